"""clip_project against the oracle: the distributions and their charges."""

from __future__ import annotations

import math

import cases
import mpmath as mp
import pytest
import torch
from cases import Case
from mpmath import mpf
from oracle_clip import Box
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import _C, Clipping, reference

CASES = cases.small() + cases.corners()
WIDE = cases.wide()
BOXES = (
    (math.exp(-0.5), math.exp(0.5)),
    (math.exp(-0.25), math.e),
    (0.9, 1e6),
    (0.0, 2.0),
    (0.5, 1e60),
    (1e-300, 3.0),
    (1.0 - 1e-9, 1.0 + 1e-9),
    (1.0, 2.0),
    (0.0, 1.0),
)
ORDERS = [1.01, 3.0, 18.0]


def single(case: Case, clipping: Clipping, i: int, b: int) -> Tensor:
    """Return p_bar of one row, as the mixture of one model."""
    one = Clipping(
        clipping.log_scale[i : i + 1, b : b + 1], clipping.residual[i : i + 1, b : b + 1], None,
        None, clipping.private_lse[i : i + 1, b : b + 1], clipping.public_lse[b : b + 1],
        clipping.status[i : i + 1, b : b + 1], clipping.lower, clipping.upper,
    )  # fmt: skip
    return adapmixed_ext.mixture(case.private[i : i + 1, b : b + 1], case.public[b : b + 1], one)[0]


def check_row(case: Case, clipping: Clipping, box: Box, i: int, b: int) -> None:
    bar, log_scale = single(case, clipping, i, b), clipping.log_scale[i, b].item()
    rounded = abs(clipping.public_lse[b].item()) + (abs(log_scale) if log_scale < math.inf else 0)
    rounding = 1e-12 + 2**-52 * rounded
    assert abs(bar.sum().item() - 1) <= rounding
    # Tokens inside the box inherit the error of s; clipped tokens inherit the error of q.
    moving = 1e-9 + 1e-14 / max(float(box.inside()), 1e-300)
    for v, (got, exact, q) in enumerate(zip(bar.tolist(), box.bar, box.q, strict=True)):
        least, most = box.lower * q, box.upper * q
        error = moving if least < exact < most else rounding
        assert abs(mpf(got) - exact) <= error * exact + mpf(1e-300), (i, b, v, got)
        assert got >= least * (1 - mpf(rounding)) - mpf(1e-300), (i, b, v, got)
        assert got <= most * (1 + mpf(rounding)) + mpf(1e-300), (i, b, v, got)


def check_charges(clipping: Clipping, box: Box, i: int, b: int, slots: int) -> None:
    assert clipping.charge is not None
    bar = box.at(clipping.log_scale[i, b].item(), clipping.residual[i, b].item())
    for got, order in zip(clipping.charge[i, b].tolist(), ORDERS, strict=True):
        exact = box.charge(bar, order, slots)
        if mp.isinf(exact) or math.isinf(got):
            assert mp.isinf(exact) and got == math.inf, (i, b, order, got)
        else:
            error = adapmixed_ext.loss_error * exact + mpf(1e-12)
            assert abs(mpf(got) - exact) <= error, (i, b, order, got, mp.nstr(exact, 17))


@pytest.mark.parametrize("case", CASES, ids=cases.ids(CASES))
def test_against_the_oracle(case: Case, device: torch.device) -> None:
    moved = case.to(device)
    for k, (lower, upper) in enumerate(BOXES):
        slots = len(case.private) if k % 2 else 100
        clipping = adapmixed_ext.clip_project(
            moved.private, moved.public, lower=lower, upper=upper, orders=ORDERS, num_models=slots
        )
        assert not clipping.status.any()
        i, b = case.rows[k % len(case.rows)]
        box = Box(case.private[i, b], case.public[b], lower, upper)
        check_row(moved, clipping, box, i, b)
        check_charges(clipping, box, i, b, slots)


@pytest.mark.parametrize("index", range(len(WIDE)))
def test_every_path(index: int, isa: str) -> None:
    """Many tokens and vector tails match the float64 reference."""
    case, (lower, upper) = WIDE[index], BOXES[index]
    clipping = adapmixed_ext.clip_project(
        case.private, case.public, lower=lower, upper=upper, orders=ORDERS
    )
    truth = reference.clip_project(case.private, case.public, lower=lower, upper=upper)
    for i, b in case.rows:
        bar = single(case, clipping, i, b)
        assert abs(bar.sum().item() - 1) <= 1e-12
        torch.testing.assert_close(bar, truth[i, b], rtol=1e-9, atol=1e-300)
    charge = reference.clip_charge(truth, case.public, lower=lower, orders=ORDERS)
    torch.testing.assert_close(clipping.charge, charge, rtol=1e-5, atol=1e-12)


def test_small_cases_on_every_path(isa: str) -> None:
    for case in cases.masked() + cases.canary() + cases.corners():
        for lower, upper in BOXES[:3]:
            clipping = adapmixed_ext.clip_project(
                case.private, case.public, lower=lower, upper=upper, orders=ORDERS
            )
            for i, b in case.rows[:2]:
                box = Box(case.private[i, b], case.public[b], lower, upper)
                check_row(case, clipping, box, i, b)
                check_charges(clipping, box, i, b, len(case.private))
    assert _C.instruction_set() == isa


def test_a_support_that_is_too_small() -> None:
    """If C q sums to less than 1 where p > 0, the other tokens share the rest like q."""
    public = torch.log(torch.tensor([[0.125, 0.125, 0.25, 0.5]]))
    private = torch.tensor([[[0.0, 0.3, -math.inf, -math.inf]]])
    got = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0)
    assert got.log_scale.item() == math.inf
    assert got.residual.item() == pytest.approx(2 / 3, rel=1e-7)
    bar = adapmixed_ext.mixture(private, public, got)[0]
    expected = torch.tensor([0.25, 0.25, 1 / 6, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(bar, expected, rtol=1e-7, atol=0.0)
    public[0, :2] = -math.inf  # without a common token the answer is q
    empty = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0, orders=3.0)
    bar = adapmixed_ext.mixture(private, public, empty)[0]
    torch.testing.assert_close(bar, public[0].double().softmax(-1), rtol=1e-12, atol=0.0)
    assert empty.charge is not None and empty.charge.item() == 0.0


def test_a_break_that_carries_half_of_the_mass() -> None:
    """s is exactly where the likeliest token reaches the edge of the box."""
    for lower, upper in ((0.5, 1.5), (0.75, 2.0)):
        ratios = torch.tensor([upper, 1.0, lower], dtype=torch.float64)
        weights = torch.tensor([1 - lower, 0.0, upper - 1], dtype=torch.float64)
        q = weights / weights.sum() * 0.5 + torch.tensor([0.0, 0.5, 0.0])
        public, private = q.log().float()[None], (q * ratios).log().float()[None, None]
        got = adapmixed_ext.clip_project(private, public, lower=lower, upper=upper)
        check_row(Case("", private, public), got, Box(private[0, 0], public[0], lower, upper), 0, 0)


@pytest.mark.parametrize(("upper", "order"), [(1 + 1e-6, 1e5), (1 + 1e-5, 1e4)])
def test_charges_at_large_orders_of_logits_far_from_0(upper: float, order: float, isa: str) -> None:
    """The charge is that of the distribution which `mixture` returns."""
    private = torch.tensor([[[-989999.625, -990003.375, -990003.125]]])
    public = torch.tensor([[990001.0, 989999.0, 990000.0]])
    got = adapmixed_ext.clip_project(private, public, lower=0.0, upper=upper, orders=order)
    box = Box(private[0, 0], public[0], 0.0, upper)
    rows = (mpf(value) for value in adapmixed_ext.mixture(private, public, got)[0].tolist())
    bar = list(rows)
    exact = box.charge([value / mp.fsum(bar) for value in bar], order, 1)
    assert got.charge is not None
    assert abs(mpf(got.charge.item()) - exact) <= adapmixed_ext.loss_error * exact


@pytest.mark.parametrize("mask", [-3.4e38, -1e30, -2e4])
def test_masks_that_are_finite(mask: float, isa: str) -> None:
    """A very low finite logit counts like -inf on tokens that the public row has."""
    private, public = cases.logits(41, 2, 2, 70, 1.0, 0.5)
    private[:, :, 5:] = mask
    hidden = private.clone()
    hidden[:, :, 5:] = -math.inf
    for lower, upper in ((0.5, 2.0), (0.97, 40.0)):
        options: dict = {"lower": lower, "upper": upper, "orders": ORDERS}
        got = adapmixed_ext.clip_project(private, public, **options)
        truth = adapmixed_ext.clip_project(hidden, public, **options)
        torch.testing.assert_close(got.charge, truth.charge, rtol=1e-9, atol=0.0)
        mixture = adapmixed_ext.mixture(private, public, got)
        assert ((mixture.sum(-1) - 1).abs() <= 1e-12).all()
        torch.testing.assert_close(
            mixture, adapmixed_ext.mixture(hidden, public, truth), rtol=1e-12, atol=0.0
        )
        losses = [
            adapmixed_ext.leave_one_out(rows, public, clipping, orders=3.0)
            for rows, clipping in ((private, got), (hidden, truth))
        ]
        torch.testing.assert_close(*losses, rtol=1e-9, atol=0.0)
