"""leave_one_out against neighbours that are really built: the loss is never under-reported."""

from __future__ import annotations

import math

import cases
import checks
import mpmath as mp
import oracle
import pytest
import torch
from cases import Case
from mpmath import mpf

import adapmixed_ext
from adapmixed_ext import reference

SMALL = cases.small()
CORNERS = cases.corners()
WIDE = cases.wide()
ADJACENCIES = ("add_remove", "zero_out")
ORDERS = cases.ORDERS


def check_case(
    case: Case, weight: torch.Tensor, complement: torch.Tensor, projection: object, where: object
) -> None:
    for adjacency in ADJACENCIES:
        loss = adapmixed_ext.leave_one_out(
            case.private, case.public, projection, orders=ORDERS, adjacency=adjacency
        )
        assert loss.dtype == torch.float64
        assert loss.shape == (*case.private.shape[:2], len(ORDERS))
        for b in range(case.public.shape[0]):
            truth = oracle.leave_one_out(
                case.private[:, b], case.public[b], weight[:, b], complement[:, b],
                ORDERS, adjacency,
            )  # fmt: skip
            for i, row in enumerate(truth):
                for k, value in enumerate(row):
                    at = (where, adjacency, (i, b), ORDERS[k])
                    assert checks.loss_holds(loss[i, b, k].item(), value, ORDERS[k]), at


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
@pytest.mark.slow
def test_projected_ensembles(case: Case, device: torch.device) -> None:
    case = case.to(device)
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (64.0, 9.5)):
        projection = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
        check_case(case, projection.weight, projection.complement, projection, (order, radius))


@pytest.mark.parametrize("case", CORNERS, ids=cases.ids(CORNERS))
def test_corners_are_never_under_reported(case: Case, device: torch.device) -> None:
    case = case.to(device)
    for order, radius in ((18.0, 3.6), (1.5, 1e-3), (64.0, 9.5)):
        projection = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
        check_bound(case, projection.weight, projection.complement, projection)
    generator = torch.Generator().manual_seed(6)
    random = torch.rand(case.private.shape[:2], generator=generator, dtype=torch.float64)
    for weight in (torch.ones_like(random), random):
        check_bound(case, weight, 1 - weight, weight.to(device))


def check_bound(
    case: Case, weight: torch.Tensor, complement: torch.Tensor, projection: object
) -> None:
    orders = cases.EXTREME_ORDERS[::2]
    for adjacency in ADJACENCIES:
        loss = adapmixed_ext.leave_one_out(
            case.private, case.public, projection, orders=orders, adjacency=adjacency
        )
        truth = oracle.leave_one_out(
            case.private[:, 0], case.public[0], weight[:, 0], complement[:, 0], orders, adjacency
        )
        for i, row in enumerate(truth):
            for k, value in enumerate(row):
                got = loss[i, 0, k].item()
                where = (adjacency, i, orders[k], got, mp.nstr(value, 17))
                assert not math.isnan(got), where
                assert got >= value - mpf("1e-60"), where  # the oracle has 70 digits


@pytest.mark.parametrize("adjacency", ADJACENCIES)
def test_weights_on_an_excluded_token_are_not_under_reported(
    adjacency: str, device: torch.device
) -> None:
    case = {case.name: case for case in cases.masked()}["masked-public"].to(device)
    weight = torch.tensor([[0.5], [0.25], [1.0]], dtype=torch.float64)
    loss = adapmixed_ext.leave_one_out(
        case.private, case.public, weight.to(device), orders=ORDERS, adjacency=adjacency
    )
    truth = oracle.leave_one_out(
        case.private[:, 0], case.public[0], weight[:, 0], 1 - weight[:, 0], ORDERS, adjacency
    )
    for i in range(3):
        for k in range(len(ORDERS)):
            got = loss[i, 0, k].item()
            assert got >= truth[i][k], (i, k)


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_every_neighbour_on_tiny_vocabularies(seed: int, device: torch.device) -> None:
    """The loss matches a mixture rebuilt without each model, measured in both directions."""
    generator = torch.Generator().manual_seed(1000 + seed)
    models, vocab = 1 + seed % 4, 2 + (seed // 4) % 4
    spread = float(torch.tensor([0.3, 2.0, 8.0])[seed % 3])
    public = spread * torch.randn(1, vocab, generator=generator)
    private = public + spread * torch.randn(models, 1, vocab, generator=generator)
    private, public = private.to(device), public.to(device)
    for order, radius in ((2.0, 0.5), (18.0, 3.6), (6.0, 50.0)):
        projection = adapmixed_ext.project(private, public, order=order, radius=radius)
        bars, q = oracle.projected(
            private[:, 0], public[0], projection.weight[:, 0], projection.complement[:, 0]
        )
        mixture = oracle.mean(bars)
        for adjacency in ADJACENCIES:
            loss = adapmixed_ext.leave_one_out(
                private, public, projection, orders=[order], adjacency=adjacency
            )
            for i in range(models):
                other = oracle.neighbour(bars, q, i, adjacency)
                reported = mpf(loss[i, 0, 0].item())
                assert oracle.renyi(mixture, other, order) <= reported
                assert oracle.renyi(other, mixture, order) <= reported


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("models", [2, 3, 7])
def test_identical_models_lose_next_to_nothing(
    models: int, dtype: torch.dtype, device: torch.device
) -> None:
    for vocab in (17, 1000):
        row, public = cases.logits(3, 1, 2, vocab, 3.0, 1.0)
        private = row.expand(models, 2, vocab).to(dtype).to(device)
        public = public.to(dtype).to(device)
        projection = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
        for weights in (projection, torch.full((models, 2), 0.3, device=device).double()):
            loss = adapmixed_ext.leave_one_out(private, public, weights, orders=ORDERS)
            assert (loss <= 1e-11).all(), (vocab, loss.max().item())


def test_weight_zero_loses_nothing_under_zero_out(device: torch.device) -> None:
    case = cases.ordinary()[2].to(device)
    weights = torch.zeros(case.private.shape[:2], dtype=torch.float64, device=device)
    weights[1] = 0.5
    loss = adapmixed_ext.leave_one_out(
        case.private, case.public, weights, orders=ORDERS, adjacency="zero_out"
    )
    assert (loss[weights == 0] == 0).all() and (loss[1] > 0).all()


@pytest.mark.parametrize("case", WIDE, ids=cases.ids(WIDE))
def test_wide_vocabularies(case: Case, device: torch.device) -> None:
    moved = case.to(device)
    for order, radius in ((18.0, 3.6), (3.0, 0.03), (64.0, 9.5)):
        projection = adapmixed_ext.project(moved.private, moved.public, order=order, radius=radius)
        pair = (projection.weight.cpu(), projection.complement.cpu())
        for adjacency in ADJACENCIES:
            truth = reference.leave_one_out(
                case.private, case.public, pair, orders=ORDERS, adjacency=adjacency
            )
            loss = adapmixed_ext.leave_one_out(
                moved.private, moved.public, projection, orders=ORDERS, adjacency=adjacency
            ).cpu()
            assert (loss >= truth * (1 - 1e-9)).all(), (order, adjacency)
            assert (loss <= truth * (1 + 1e-4) + 1e-9).all(), (order, adjacency)


@pytest.mark.parametrize("case", WIDE, ids=cases.ids(WIDE))
def test_wide_vocabularies_on_every_path(case: Case, isa: str) -> None:
    test_wide_vocabularies(case, torch.device("cpu"))


SINGLE = [(case, *ball) for case in cases.single() for ball in ((18.0, 0.3), (3.0, 0.03))]


@pytest.mark.parametrize(
    "case,order,radius", SINGLE, ids=[f"{found[0].name}-{found[1]}" for found in SINGLE]
)
def test_single_precision_on_every_path(case: Case, order: float, radius: float, isa: str) -> None:
    """Weights and losses computed in floats keep their bounds."""
    torch.set_num_threads(1)
    result = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
    pair = result.weight, result.complement
    assert ((pair[0] > 0) & (pair[0] < 0.5)).all()
    report = checks.Report()
    for b in range(case.public.shape[0]):
        report.add(
            checks.check_weights(
                case.private[:, b], case.public[b].expand_as(case.private[:, b]),
                pair[0][None, :, b], pair[1][None, :, b], order, [radius], case.name,
            )
        )  # fmt: skip
    assert not report.failures, report.failures
    for adjacency in ADJACENCIES:
        loss = adapmixed_ext.leave_one_out(
            case.private, case.public, result, orders=[2.5, 18.0], adjacency=adjacency
        )
        truth = reference.leave_one_out(
            case.private, case.public, pair, orders=[2.5, 18.0], adjacency=adjacency
        )
        assert (loss >= truth).all() and (loss <= truth * (1 + 1e-4) + 1e-9).all(), adjacency


@pytest.mark.parametrize(
    "vocab,adjacency",
    [(50257, "zero_out"), pytest.param(128256, "add_remove", marks=pytest.mark.slow)],
)
def test_vocabularies_of_language_models(vocab: int, adjacency: str, device: torch.device) -> None:
    """Chunks above the minimum size match the float64 reference."""
    torch.set_num_threads(1)
    private, public = cases.logits(vocab, 8, 1, vocab, 2.0, 1.0)
    inputs = private.to(device), public.to(device)
    result = adapmixed_ext.project(*inputs, order=18.0, radius=0.3)
    pair = result.weight.cpu(), result.complement.cpu()
    report = checks.check_weights(
        private[:3, 0], public.expand(3, -1), pair[0][None, :3, 0], pair[1][None, :3, 0],
        18.0, [0.3],
    )  # fmt: skip
    assert not report.failures, report.failures
    orders = [2.5, 18.0]
    loss = adapmixed_ext.leave_one_out(*inputs, result, orders=orders, adjacency=adjacency).cpu()
    truth = reference.leave_one_out(private, public, pair, orders=orders, adjacency=adjacency)
    assert (loss >= truth).all() and (loss <= truth * (1 + 1e-4) + 1e-9).all()


def test_orders_may_be_one_number(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    projection = adapmixed_ext.project(case.private, case.public, order=3.0, radius=0.5)
    one = adapmixed_ext.leave_one_out(case.private, case.public, projection, orders=3.0)
    many = adapmixed_ext.leave_one_out(case.private, case.public, projection, orders=[2, 3])
    assert one.shape == (*case.private.shape[:2], 1)
    torch.testing.assert_close(one[..., 0], many[..., 1], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("order", [2.0, 256.0, 1024.0])
def test_differences_that_floats_do_not_see(isa: str, order: float) -> None:
    """Weights that differ by a rounding still give the right losses.

    The float deviations of the logits agree, so a loss is the square of what floats lose. High
    orders show it; at order 2 the answer may be 0. All tokens that a sample would look at are
    masked.
    """
    public = torch.full((1, 128), -math.inf)
    public[0, 1::2] = 0.0
    public[0, 1] = -8.0
    private = public.repeat(4, 1, 1)
    private[:, 0, 1] = 5.0
    weight = torch.full((4, 1), 0.5000000689178705, dtype=torch.float64)
    weight[0] = 0.5000000111758709
    loss = adapmixed_ext.leave_one_out(private, public, weight, orders=order)
    exact = reference.leave_one_out(private, public, weight, orders=order)
    for i in range(4):
        assert checks.loss_holds(loss[i, 0, 0].item(), mpf(exact[i, 0, 0].item()), order), i


def test_high_orders_leave_low_ones_close() -> None:
    """Interpolants of order 1024 reach |x| = 0.005; larger x are no less exact for it."""
    private, public = cases.logits(4, 20, 1, 1000, 2.0, 1.0)
    weight, orders = torch.ones(20, 1, dtype=torch.float64), [8.0, 16.0, 1024.0]
    loss = adapmixed_ext.leave_one_out(private, public, weight, orders=orders)
    exact = reference.leave_one_out(private, public, weight, orders=orders)
    assert (loss >= exact)[..., :2].all()
    assert (loss <= exact * (1 + 2e-5) + 1e-9)[..., :2].all()


@pytest.mark.parametrize(
    "models,order,spread", [(16, 64.0, 0.012), (16, 1024.0, 0.003), (40, 1024.0, 0.004)]
)
def test_models_that_are_alike_and_far_from_the_public_one(
    models: int, order: float, spread: float
) -> None:
    """What they share is a thousand times what they differ by."""
    generator = torch.Generator().manual_seed(1)
    public = torch.tensor([[-8.0] * 16 + [0.0] * 16])
    private = public + torch.tensor([11.0] * 16 + [-0.1] * 16)
    private = private + spread * torch.randn(models, 1, 32, generator=generator)
    weight = torch.full((models, 1), 0.5, dtype=torch.float64)
    loss = adapmixed_ext.leave_one_out(private, public, weight, orders=order)
    exact = reference.leave_one_out(private, public, weight, orders=order)
    for i in range(models):
        assert checks.loss_holds(loss[i, 0, 0].item(), mpf(exact[i, 0, 0].item()), order), i


def test_a_rare_token_makes_up_the_loss() -> None:
    """One member's p/q is 3.8, the others' 0.285; at order 64 the rounding of x counts 60 times."""
    public = torch.tensor([[0.0, -38.0]])
    private = public.repeat(16, 1, 1)
    private[:, 0, 1] += math.log(0.285)
    private[0, 0, 1] = -38 + math.log(3.8)
    weight = torch.ones(16, 1, dtype=torch.float64)
    loss = adapmixed_ext.leave_one_out(private, public, weight, orders=64.0)
    truth = oracle.leave_one_out(
        private[:, 0], public[0], weight[:, 0], 1 - weight[:, 0], [64.0], "add_remove"
    )
    for i in range(16):
        assert checks.loss_holds(loss[i, 0, 0].item(), truth[i][0], 64.0), i
