"""clip_project, beyond what test_contract.py checks: its definition and its charges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import cases
import checks
import pytest
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Clipping, reference

LOWER, UPPER = math.exp(-0.25), math.e
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


def test_a_support_that_is_too_small(device: torch.device) -> None:
    """If C q sums to less than 1 where p > 0, the other tokens share the rest like q."""
    public = torch.log(torch.tensor([[0.125, 0.125, 0.25, 0.5]], device=device))
    private = torch.tensor([[[0.0, 0.3, -math.inf, -math.inf]]], device=device)
    got = clip(private, public, lower=0.5, upper=2.0)
    assert got.log_scale.item() == math.inf
    assert got.residual.item() == pytest.approx(2 / 3, rel=1e-7)
    bar = adapmixed_ext.mixture(private, public, got)[0].cpu()
    expected = torch.tensor([0.25, 0.25, 1 / 6, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(bar, expected, rtol=1e-7, atol=0.0)
    public[0, :2] = -math.inf  # without a common token the answer is q
    empty = clip(private, public, lower=0.5, upper=2.0)
    bar = adapmixed_ext.mixture(private, public, empty)[0]
    torch.testing.assert_close(bar, public[0].double().softmax(-1), rtol=1e-12, atol=0.0)
    assert (charges(empty) == 0.0).all()


def test_no_feasible_distribution_is_nearer() -> None:
    """No random x with c q <= x <= C q has a smaller KL(p||x) or KL(x||p)."""
    private, public = rows()
    private[1, :, 7] = -3.0
    p, q = private.double().softmax(-1), public.double().softmax(-1)
    bar = reference.clip_project(private, public, lower=LOWER, upper=UPPER)
    ours = (p * (p / bar).log()).sum(-1), (bar * (bar / p).log()).sum(-1)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 0.1, 1.0, 5.0) * 3:
        noise = size * torch.randn(private.shape, generator=generator)
        x = reference.clip_project(
            (bar * noise.exp()).log(), public, lower=LOWER, upper=UPPER
        )  # feasible: inside the box, with sum 1
        assert ((x >= LOWER * q * (1 - 1e-12)) & (x <= UPPER * q * (1 + 1e-12))).all()
        assert ((p * (p / x).log()).sum(-1) >= ours[0] - 1e-9).all()
        assert ((x * (x / p).log()).sum(-1) >= ours[1] - 1e-9).all()


def test_a_public_row_charges_nothing(device: torch.device) -> None:
    for dtype in cases.DTYPES:
        private, public = (x.to(dtype).to(device) for x in rows())
        got = clip(private, public)
        assert (charges(got)[3] == 0).all() and (charges(got)[[0, 1, 2, 4]] > 0).all()
        assert torch.equal(got.private_lse[3], got.public_lse)
        for box in ((1.0, 5.0), (0.2, 1.0)):
            none = clip(private, public, lower=box[0], upper=box[1])
            assert (charges(none) == 0).all() and (none.lower, none.upper) == (1.0, 1.0)


def test_members_that_take_no_part_answer_q_and_are_charged_alike() -> None:
    private, public = rows(seed=5)
    nobody = torch.zeros(private.shape[:2], dtype=torch.bool)
    for box in ((LOWER, UPPER), (0.9, 9e5)):
        whole, idle = (
            clip(private, public, lower=box[0], upper=box[1], active=active)
            for active in (None, nobody)
        )
        assert torch.equal(charges(idle), charges(whole))
        q = public.double().softmax(-1)
        mixture = adapmixed_ext.mixture(private, public, idle)
        torch.testing.assert_close(mixture, q, rtol=1e-12, atol=0.0)
        assert (adapmixed_ext.leave_one_out(private, public, idle, orders=3.0) == 0).all()


def test_charges_grow_with_the_order_and_fall_with_the_slots() -> None:
    private, public = rows()
    for box in ((LOWER, UPPER), (0.5, 1e3), (0.0, 3.0)):
        charge = charges(clip(private, public, lower=box[0], upper=box[1]))
        assert (charge[..., 1:] >= charge[..., :-1] * (1 - 2e-5) - 1e-12).all()
        more = charges(clip(private, public, lower=box[0], upper=box[1], num_models=50))
        assert (more <= charge * (1 + 2e-5) + 1e-12).all()


def test_a_loss_is_at_most_the_charge() -> None:
    """A zero-out loss is at most the charge, which assumes the worst other models."""
    for case in (*cases.masked(), *cases.canary(), *cases.wide()):
        got = clip(case.private, case.public, lower=0.5, upper=3.0)
        loss = adapmixed_ext.leave_one_out(
            case.private, case.public, got, orders=ORDERS, adjacency="zero_out"
        )
        most = charges(got) * (1 + checks.loss_tolerance(18.0)) + checks.LOSS_FLOOR
        assert (loss <= most).all(), case.name


def test_without_orders_there_is_no_charge() -> None:
    private, public = rows()
    bare, whole = clip(private, public, orders=None), clip(private, public)
    assert bare.charge is None and torch.equal(bare.log_scale, whole.log_scale)
    assert replace(bare).check() is not None


def test_a_nan_among_far_tokens_is_noticed(isa: str) -> None:
    public, private = torch.tensor([[0.0, -20.0, -1.0]]), torch.tensor([[[0.0, -20.5, -1.2]]])
    found = clip(private, public)
    private[0, 0, 1] = math.nan
    with pytest.raises(ValueError, match="projection must belong to these logits"):
        adapmixed_ext.mixture(private, public, found)


def test_long_rows_sum_alike(isa: str) -> None:
    """Adding a row up in one chain would be off by more than 1e-12, in one direction."""
    vocab = 2**20
    public, private = torch.zeros(1, vocab), torch.zeros(3, 1, vocab)
    levels = ((0.1, 0.3), (0.3, 5.0), (0.001, 0.3))
    for row, (share, height) in zip(private, levels, strict=True):
        row[0, : int(share * vocab)] += height
    whole = clip(private, public, lower=0.1, upper=250.0)
    for i in range(3):
        bar = adapmixed_ext.mixture(private[i : i + 1], public, checks.row_of(whole, i))
        assert abs(math.fsum(bar[0].tolist()) - 1) <= 2.5e-13
