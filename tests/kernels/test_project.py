"""project: the largest weight inside the Rényi ball, approached from below."""

from __future__ import annotations

import math
from functools import cache

import cases
import checks
import oracle
import pytest
import torch
from cases import Case

import adapmixed_ext
from adapmixed_ext import reference

TOLERANCE = 1e-5
SMALL = cases.small()
CORNERS = cases.corners()
HUGE = cases.huge()
WIDE = cases.wide()


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_feasible_and_nearly_maximal(case: Case, device: torch.device) -> None:
    check_grid(case.to(device), cases.ORDERS, maximal=True)


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_feasible_at_extreme_orders(case: Case, device: torch.device) -> None:
    check_grid(case.to(device), (128.0, 256.0), maximal=False)


@pytest.mark.parametrize("case", CORNERS, ids=cases.ids(CORNERS))
def test_corners_are_feasible(case: Case, device: torch.device) -> None:
    check_grid(case.to(device), cases.EXTREME_ORDERS, maximal=False)


@pytest.mark.parametrize("case", HUGE, ids=cases.ids(HUGE))
def test_huge_logits_are_refused_or_feasible(case: Case, device: torch.device) -> None:
    """A log-sum-exp of 1e30 loses the normalisation: an error is right, a wrong weight is not."""
    try:
        check_grid(case.to(device), cases.EXTREME_ORDERS, maximal=False)
    except ValueError as error:
        assert "_logits" in str(error)


def check_grid(case: Case, orders: tuple[float, ...], maximal: bool) -> None:
    private, public = case.private, case.public
    balls = {(i, b): oracle.Ball(private[i, b], public[b]) for i, b in distinct_rows(case)}
    for order in orders:
        for radius in cases.RADII:
            result = adapmixed_ext.project(private, public, order=order, radius=radius)
            result.check()
            weight, complement = result.weight.cpu(), result.complement.cpu()
            assert weight.dtype == complement.dtype == torch.float64
            assert weight.shape == complement.shape == private.shape[:2]
            for (i, b), ball in balls.items():
                w, c = weight[i, b].item(), complement[i, b].item()
                where = f"row ({i}, {b}) order {order} radius {radius}: {w!r}, {c!r}"
                assert 0 <= w <= 1 and 0 <= c <= 1 and abs(w + c - 1) < 1e-15, where
                assert (w == 1) <= (c < 1e-15), where
                assert ball.admits(w, c, order, radius), where
                if maximal:
                    assert ball.nearly_maximal(w, c, order, radius, TOLERANCE), where


def distinct_rows(case: Case) -> list[tuple[int, int]]:
    """Return one index of each distinct pair of rows, because the oracle is slow."""
    seen: dict[tuple[float, ...], tuple[int, int]] = {}
    for i, b in case.rows:
        key = (*case.private[i, b].tolist(), *case.public[b].tolist())
        seen.setdefault(key, (i, b))
    return list(seen.values())


def ranged() -> list[Case]:
    """Return rows with small and large differences, rare tokens, and log-sum-exps far from 0."""
    plans = [(0.1, 0.05, 5), (1.0, 0.01, 17), (3.0, 0.6, 17), (10.0, 3.0, 9)]
    result = []
    for seed, (spread, noise, vocab) in enumerate(plans):
        private, public = cases.logits(40 + seed, 2, 1, vocab, spread, noise)
        private[1] = private[1].double().sub(700.0).float()
        name = f"spread{spread}-noise{noise}"
        result.append(Case(name, private, public + 300.0 * (seed % 2)))
    by_name = {case.name: case for case in (*cases.canary(), *cases.masked())}
    return [*result, by_name["canary-N4"], by_name["masked-one-model"], by_name["lost-tokens"]]


@pytest.mark.parametrize("order", [1.01, 2.0, 64.0, 256.0, 1000.0, 1e4, 1e5, 1e6])
def test_the_range_in_which_weights_are_near_the_optimum(
    order: float, device: torch.device
) -> None:
    """Weights are near the optimum from the stated (order - 1) radius on, and feasible below it."""
    for case in ranged():
        moved = case.to(device)
        balls = {(i, b): oracle.Ball(case.private[i, b], case.public[b]) for i, b in case.rows}
        for times in (1e-3, 0.1, 1.0, 3.0, 100.0, 1e4):
            radius = times * checks.least_target(order) / (order - 1)
            result = adapmixed_ext.project(moved.private, moved.public, order=order, radius=radius)
            assert checks.resolved(order, radius) == (times >= 1)
            for (i, b), ball in balls.items():
                w, c = result.weight[i, b].item(), result.complement[i, b].item()
                fault = checks.weight_fault(ball, w, c, order, radius)
                assert not fault, (fault, case.name, (i, b), times, w, c)


def test_single_precision_stays_below_the_optimum_by_what_it_may_cost() -> None:
    """The margin is 17 float units for the weight, and 20 for the excess (quadratic in the weight).

    See csrc/project/float_search.h. Hardly any row needs the margin, so only this test would notice
    its loss.
    """
    private, public = cases.logits(5, 7, 1, 17, 1.0, 1.0)
    result = adapmixed_ext.project(private, public, order=2.0, radius=0.03)
    for i in range(len(private)):
        optimum, _ = oracle.Ball(private[i, 0], public[0]).optimum(2.0, 0.03)
        below = float(1 - result.weight[i, 0].item() / optimum)
        assert optimum < 0.5  # else double precision finds 1 - λ
        assert (17 + 20 / 2) * 2.0**-24 <= below <= TOLERANCE, i


@cache  # a whole vocabulary takes seconds
def optimum(index: int, order: float, radius: float) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.project(WIDE[index].private, WIDE[index].public, order=order, radius=radius)


@pytest.mark.parametrize("index", range(len(WIDE)), ids=cases.ids(WIDE))
def test_wide_vocabularies(index: int, device: torch.device) -> None:
    case = WIDE[index]
    for order, radius in ((3.0, 0.03), (18.0, 3.6), (64.0, 50.0)):
        weight, complement = optimum(index, order, radius)
        moved = case.to(device)
        result = adapmixed_ext.project(moved.private, moved.public, order=order, radius=radius)
        got, rest = result.weight.cpu(), result.complement.cpu()
        assert (got <= weight * (1 + 1e-9)).all(), (order, radius)
        assert (got >= weight * (1 - TOLERANCE)).all(), (order, radius)
        inner = (weight > 0.5) & (got < 1) & (complement > 0)
        assert (rest[inner] >= complement[inner] * (1 - 1e-9)).all(), (order, radius)
        assert (rest[inner] <= complement[inner] * (1 + TOLERANCE)).all(), (order, radius)


@pytest.mark.parametrize("index", range(len(WIDE)), ids=cases.ids(WIDE))
def test_wide_vocabularies_on_every_path(index: int, isa: str) -> None:
    test_wide_vocabularies(index, torch.device("cpu"))


def test_log_sum_exps(device: torch.device) -> None:
    for case in (*cases.ordinary(), *cases.masked(), *cases.wide()):
        moved = case.to(device)
        result = adapmixed_ext.project(moved.private, moved.public, order=2.0, radius=0.5)
        for lse, logits in (
            (result.private_lse, case.private), (result.public_lse, case.public)
        ):  # fmt: skip
            assert lse.dtype == torch.float64
            exact = torch.logsumexp(logits.double(), -1)
            torch.testing.assert_close(lse.cpu(), exact, rtol=0.0, atol=1e-7)


def test_status_is_zero_on_good_rows(device: torch.device) -> None:
    case = cases.ordinary()[0].to(device)
    result = adapmixed_ext.project(case.private, case.public, order=2.0, radius=0.5)
    assert result.status.dtype == torch.int32
    assert result.status.shape == case.private.shape[:2]
    assert (result.status == 0).all()


@pytest.mark.parametrize("order,radius", [(18.0, 3.6), (3.0, 0.03), (1.5, 0.5), (2.5, 1e-6)])
def test_a_row_does_not_depend_on_its_batch(
    order: float, radius: float, device: torch.device
) -> None:
    for case in (*cases.wide(), *cases.strided(), *cases.masked()):
        case = case.to(device)
        batch = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
        for i, b in case.rows:
            single = adapmixed_ext.project(
                case.private[i : i + 1, b : b + 1], case.public[b : b + 1],
                order=order, radius=radius,
            )  # fmt: skip
            for name in ("weight", "complement", "private_lse"):
                assert torch.equal(getattr(single, name)[0, 0], getattr(batch, name)[i, b]), name
            assert torch.equal(single.public_lse[0], batch.public_lse[b])


def test_strides_do_not_matter(device: torch.device) -> None:
    for case in cases.strided():
        case = case.to(device)
        strided = adapmixed_ext.project(case.private, case.public, order=18.0, radius=3.6)
        dense = adapmixed_ext.project(
            case.private.clone(memory_format=torch.contiguous_format),
            case.public.clone(memory_format=torch.contiguous_format), order=18.0, radius=3.6,
        )  # fmt: skip
        assert torch.equal(strided.weight, dense.weight), case.name
        assert torch.equal(strided.complement, dense.complement), case.name


def test_inputs_of_inner_stride_are_copied_not_misread(device: torch.device) -> None:
    private, public = cases.logits(1, 2, 2, 34, 2.0, 0.5)
    private, public = private.to(device)[..., ::2], public.to(device)[..., ::2]
    sparse = adapmixed_ext.project(private, public, order=3.0, radius=0.03)
    dense = adapmixed_ext.project(private.contiguous(), public.contiguous(), order=3.0, radius=0.03)
    assert torch.equal(sparse.weight, dense.weight)


def test_no_argument_is_changed(device: torch.device) -> None:
    case = cases.masked()[3].to(device)
    private, public = case.private.clone(), case.public.clone()
    adapmixed_ext.project(case.private, case.public, order=18.0, radius=3.6)
    assert torch.equal(private, case.private) and torch.equal(public, case.public)


def test_a_token_the_public_model_excludes_leaves_weight_zero(device: torch.device) -> None:
    by_name = {case.name: case.to(device) for case in cases.masked()}
    result = project(by_name["masked-public"])
    assert (result.weight == 0).all() and (result.complement == 1).all()
    result = project(by_name["masked-mixed"])
    assert result.weight[0, 0] > 0
    assert (result.weight[1:] == 0).all() and (result.complement[1:] == 1).all()


def test_a_token_the_private_model_excludes_keeps_the_complement(device: torch.device) -> None:
    """The weight is 1 - 2e-22, which float64 rounds to 1; the complement keeps the difference."""
    case = {case.name: case.to(device) for case in cases.masked()}["masked-private"]
    result = adapmixed_ext.project(case.private, case.public, order=64.0, radius=50.0)
    assert (result.complement > 1e-23).all() and (result.complement < 1e-20).all()
    assert (result.weight > 1 - 1e-15).all()


def test_a_model_equal_to_the_public_one_keeps_weight_one(device: torch.device) -> None:
    case = {case.name: case.to(device) for case in cases.identical()}["equal-to-public"]
    for order in cases.EXTREME_ORDERS:
        for radius in cases.RADII:
            result = adapmixed_ext.project(case.private, case.public, order=order, radius=radius)
            assert (result.weight == 1).all() and (result.complement == 0).all(), (order, radius)


def test_radius_zero_admits_nothing(device: torch.device) -> None:
    case = cases.ordinary()[3].to(device)
    result = adapmixed_ext.project(case.private, case.public, order=3.0, radius=0.0)
    assert (result.weight == 0).all() and (result.complement == 1).all()


@pytest.mark.parametrize("models,vocab", [(3, 17), (1, 1)])
def test_an_empty_batch(models: int, vocab: int, device: torch.device) -> None:
    private = torch.zeros(models, 0, vocab, device=device)
    result = adapmixed_ext.project(
        private, torch.zeros(0, vocab, device=device), order=2.0, radius=1.0
    )
    assert result.weight.shape == result.complement.shape == result.status.shape == (models, 0)
    assert result.private_lse.shape == (models, 0) and result.public_lse.shape == (0,)
    result.check()


def project(case: Case) -> adapmixed_ext.Projection:
    return adapmixed_ext.project(case.private, case.public, order=18.0, radius=3.6)


def test_many_models(device: torch.device) -> None:
    private, public = cases.logits(9, 100, 1, 50, 2.0, 1.0)
    weight, _ = reference.project(private, public, order=18.0, radius=3.6)
    result = adapmixed_ext.project(private.to(device), public.to(device), order=18.0, radius=3.6)
    got = result.weight.cpu()
    assert (got <= weight * (1 + 1e-9)).all() and (got >= weight * (1 - TOLERANCE)).all()
    assert math.isfinite(got.sum().item())


def test_a_nan_is_found_wherever_it_hides(device: torch.device) -> None:
    """A NaN is found in every lane and tail, also among -inf, and the next call is unaffected."""
    case = cases.ordinary()[3].to(device)
    before = project(case).weight
    for vocab in (1, 2, 15, 16, 17, 33, 130):
        for token in range(vocab):
            private, public = torch.zeros(2, 1, vocab), torch.zeros(1, vocab)
            private[1, 0] = -math.inf
            private[1, 0, token] = math.nan
            bad = Case("nan", private, public).to(device)
            with pytest.raises(ValueError, match=r"private_logits\[1, 0\] contains NaN"):
                project(bad).check()
    assert torch.equal(project(case).weight, before)
