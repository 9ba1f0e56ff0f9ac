"""clip_project against the oracle: the distributions, their charges, and their properties."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cases
import checks
import oracle_clip
import pytest
import torch
from cases import Case
from oracle_clip import check_charges, check_row
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Clipping, reference

SMALL = cases.small()
WIDE = cases.wide()
LOWER, UPPER = math.exp(-0.25), math.e
BOXES = (
    (math.exp(-0.5), math.exp(0.5)),
    (LOWER, UPPER),
    (0.9, 9e5),  # C/c is the largest allowed
    (0.0, 2.0),
    (1.0 - 1e-9, 1.0 + 1e-9),
    (1.0, 2.0),
    (0.0, 1.0),
)
ORDERS = [1.01, 3.0, 18.0]


def clip(private: Tensor, public: Tensor, **options: Any) -> Clipping:
    given = {"lower": LOWER, "upper": UPPER, "orders": ORDERS} | options
    return adapmixed_ext.clip_project(private, public, **given)


def charges(clipping: Clipping) -> Tensor:
    assert clipping.charge is not None
    return clipping.charge


def rows(seed: int = 0, models: int = 5, vocab: int = 70) -> tuple[Tensor, Tensor]:
    private, public = cases.logits(seed, models, 3, vocab, 2.0, 0.8)
    private[1, :, 7], private[2, 1, 9] = -math.inf, 12.0
    private[3] = public
    return private, public


@pytest.mark.parametrize("case", SMALL, ids=cases.ids(SMALL))
def test_against_the_oracle(case: Case, device: torch.device) -> None:
    moved = case.to(device)
    for k, (lower, upper) in enumerate(BOXES):
        slots = len(case.private) if k % 2 else 100
        found = clip(moved.private, moved.public, lower=lower, upper=upper, num_models=slots)
        assert not found.status.any()
        i, b = case.rows[k % len(case.rows)]
        box = check_row(moved.private, moved.public, found, i, b)
        check_charges(found, box, i, b, ORDERS, slots)


def test_small_cases_on_every_path(isa: str) -> None:
    for case in cases.masked() + cases.canary() + cases.corners():
        for lower, upper in BOXES[:3]:
            found = clip(case.private, case.public, lower=lower, upper=upper)
            i, b = case.rows[0]
            box = check_row(case.private, case.public, found, i, b)
            check_charges(found, box, i, b, ORDERS, len(case.private))


@pytest.mark.parametrize("index", range(len(WIDE)))
def test_wide_vocabularies_on_every_path(index: int, isa: str) -> None:
    case, (lower, upper) = WIDE[index], BOXES[index]
    found = clip(case.private, case.public, lower=lower, upper=upper)
    truth = reference.clip_project(case.private, case.public, lower=lower, upper=upper)
    for i in range(len(case.private)):
        bar = adapmixed_ext.mixture(
            case.private[i : i + 1], case.public, oracle_clip.row_of(found, i)
        )
        assert ((bar.sum(-1) - 1).abs() <= 1e-12).all()
        torch.testing.assert_close(bar, truth[i], rtol=1e-9, atol=1e-300)
    charge = reference.clip_charge(truth, case.public, lower=lower, orders=ORDERS)
    torch.testing.assert_close(found.charge, charge, rtol=2e-5, atol=2e-12)
    assert (charges(found) >= charge * (1 - 1e-9)).all()


def test_a_support_that_is_too_small() -> None:
    """If C q sums to less than 1 where p > 0, the other tokens share the rest like q."""
    public = torch.log(torch.tensor([[0.125, 0.125, 0.25, 0.5]]))
    private = torch.tensor([[[0.0, 0.3, -math.inf, -math.inf]]])
    got = clip(private, public, lower=0.5, upper=2.0)
    assert got.log_scale.item() == math.inf
    assert got.residual.item() == pytest.approx(2 / 3, rel=1e-7)
    bar = adapmixed_ext.mixture(private, public, got)[0]
    expected = torch.tensor([0.25, 0.25, 1 / 6, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(bar, expected, rtol=1e-7, atol=0.0)
    public[0, :2] = -math.inf  # without a common token the answer is q
    empty = clip(private, public, lower=0.5, upper=2.0)
    bar = adapmixed_ext.mixture(private, public, empty)[0]
    torch.testing.assert_close(bar, public[0].double().softmax(-1), rtol=1e-12, atol=0.0)
    assert (charges(empty) == 0.0).all()


def test_a_break_that_carries_half_of_the_mass() -> None:
    """s is exactly where the likeliest token reaches the edge of the box."""
    for lower, upper in ((0.5, 1.5), (0.75, 2.0)):
        ratios = torch.tensor([upper, 1.0, lower], dtype=torch.float64)
        weights = torch.tensor([1 - lower, 0.0, upper - 1], dtype=torch.float64)
        q = weights / weights.sum() * 0.5 + torch.tensor([0.0, 0.5, 0.0])
        public, private = q.log().float()[None], (q * ratios).log().float()[None, None]
        check_row(private, public, clip(private, public, lower=lower, upper=upper), 0, 0)


def test_no_feasible_distribution_is_nearer() -> None:
    """No random x with c q <= x <= C q has a smaller KL(p||x) or KL(x||p)."""
    private, public = rows()
    private[1, :, 7] = -3.0
    p, q = private.double().softmax(-1), public.double().softmax(-1)
    bar = reference.clip_project(private, public, lower=LOWER, upper=UPPER)
    ours = (p * (p / bar).log()).sum(-1), (bar * (bar / p).log()).sum(-1)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 0.1, 1.0, 5.0) * 10:
        noise = size * torch.randn(private.shape, generator=generator)
        x = reference.clip_project(
            (bar * noise.exp()).log(), public, lower=LOWER, upper=UPPER
        )  # feasible: inside the box, with sum 1
        assert ((x >= LOWER * q * (1 - 1e-12)) & (x <= UPPER * q * (1 + 1e-12))).all()
        assert ((p * (p / x).log()).sum(-1) >= ours[0] - 1e-9).all()
        assert ((x * (x / p).log()).sum(-1) >= ours[1] - 1e-9).all()


def test_a_public_row_charges_nothing() -> None:
    for dtype in cases.DTYPES:
        private, public = (x.to(dtype) for x in rows())
        got = clip(private, public)
        assert (charges(got)[3] == 0).all() and (charges(got)[[0, 1, 2, 4]] > 0).all()
        assert torch.equal(got.private_lse[3], got.public_lse)
        for box in ((1.0, 5.0), (0.2, 1.0)):
            none = clip(private, public, lower=box[0], upper=box[1])
            assert (charges(none) == 0).all() and (none.lower, none.upper) == (1.0, 1.0)


def test_a_charge_depends_on_its_own_row_alone(isa: str) -> None:
    private, public = rows()
    for box in ((LOWER, UPPER), (0.0, 50.0), (0.9, 9e5)):
        options = {"lower": box[0], "upper": box[1], "num_models": 9}
        whole = clip(private, public, **options)
        for i in range(len(private)):
            alone = clip(private[i : i + 1], public, **options)
            for name in ("log_scale", "residual", "charge", "private_lse"):
                assert torch.equal(getattr(alone, name)[0], getattr(whole, name)[i]), (i, name)
        active = torch.zeros(private.shape[:2], dtype=torch.bool)
        idle = clip(private, public, active=active, **options)
        assert torch.equal(charges(idle), charges(whole))


def test_charges_grow_with_the_order_and_fall_with_the_slots() -> None:
    private, public = rows()
    for box in ((LOWER, UPPER), (0.5, 1e3), (0.0, 3.0)):
        charge = charges(clip(private, public, lower=box[0], upper=box[1]))
        assert (charge[..., 1:] >= charge[..., :-1] * (1 - 2e-5) - 1e-12).all()
        more = charges(clip(private, public, lower=box[0], upper=box[1], num_models=50))
        assert (more <= charge * (1 + 2e-5) + 1e-12).all()


@pytest.mark.parametrize("box", [(LOWER, UPPER), (0.5, 2.0), (0.9, 9e5), (0.01, 30.0)])
def test_what_the_operators_make_of_it(box: tuple[float, float], isa: str) -> None:
    private, public = rows(seed=5)
    public[1, 11] = private[:, 1, 11] = -math.inf
    public[2, 12] = -math.inf
    active = torch.rand(5, 3, generator=torch.Generator().manual_seed(3)) < 0.7
    targets = torch.tensor([7, 11, 69])
    q = public.double().softmax(-1)
    for mask in (None, active, torch.zeros_like(active)):
        got = clip(private, public, lower=box[0], upper=box[1], active=mask)
        mixture = adapmixed_ext.mixture(private, public, got)
        torch.testing.assert_close(
            mixture, reference.mixture(private, public, got), rtol=1e-9, atol=1e-300
        )
        inside = (mixture >= box[0] * q * (1 - 1e-12)) & (mixture <= box[1] * q * (1 + 1e-12))
        assert inside.all()
        log_prob = adapmixed_ext.log_prob(private, public, got, targets)
        picked = mixture.gather(1, targets[:, None])[:, 0].log()
        torch.testing.assert_close(log_prob, picked, rtol=1e-12, atol=1e-9)
        for adjacency, slots in (("add_remove", 5), ("zero_out", 5), ("zero_out", 8)):
            options: dict = {"adjacency": adjacency, "num_models": slots, "orders": [3.0, 18.0]}
            loss = adapmixed_ext.leave_one_out(private, public, got, **options)
            exact = reference.leave_one_out(private, public, got, **options)
            torch.testing.assert_close(loss, exact, rtol=1e-4, atol=1e-9)
            assert (loss >= exact * (1 - 1e-9)).all()
    torch.testing.assert_close(mixture, q, rtol=1e-12, atol=0.0)  # no member is active
    assert (loss == 0).all()


def test_losses_against_the_oracle_and_below_the_charge() -> None:
    """A zero-out loss is at most the charge, which assumes the worst other models."""
    private, public = cases.logits(11, 3, 2, 17, 2.0, 1.5)
    got = clip(private, public, orders=[3.0, 18.0], lower=0.5, upper=3.0)
    loss = {
        adjacency: adapmixed_ext.leave_one_out(
            private, public, got, orders=[3.0, 18.0], adjacency=adjacency
        )
        for adjacency in ("add_remove", "zero_out")
    }
    assert (loss["zero_out"] <= charges(got) * (1 + 2e-5) + 1e-12).all()
    for b in range(2):
        bars, q = oracle_clip.distributions(private[:, b], public[b], 0.5, 3.0)
        for adjacency, values in loss.items():
            for i in range(3):
                for k, order in enumerate((3.0, 18.0)):
                    exact = oracle_clip.loss(bars, q, i, order, adjacency)
                    at = (adjacency, i, b, order)
                    assert checks.loss_holds(values[i, b, k].item(), exact, order), at


def test_identical_models_lose_next_to_nothing() -> None:
    private, public = rows(models=4)
    same = private[:1].expand(4, 3, 70)
    loss = adapmixed_ext.leave_one_out(same, public, clip(same, public), orders=ORDERS)
    assert (loss <= 1e-11).all()


def test_without_orders_there_is_no_charge() -> None:
    private, public = rows()
    bare, whole = clip(private, public, orders=None), clip(private, public)
    assert bare.charge is None and torch.equal(bare.log_scale, whole.log_scale)
    assert replace(bare).check() is not None


def test_a_nan_among_far_tokens_is_noticed(isa: str) -> None:
    public, private = torch.tensor([[0.0, -20.0, -1.0]]), torch.tensor([[[0.0, -20.5, -1.2]]])
    found = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0)
    private[0, 0, 1] = math.nan
    with pytest.raises(ValueError, match="projection must belong to these logits"):
        adapmixed_ext.mixture(private, public, found)
