"""Properties of a clipping that hold for all rows, and what other operators compute from it."""

from __future__ import annotations

import math
from dataclasses import replace

import cases
import mpmath as mp
import oracle_clip
import pytest
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Clipping, reference

LOWER, UPPER = math.exp(-0.25), math.e
ORDERS = [1.5, 2.0, 8.0, 18.0, 64.0]


def rows(seed: int = 0, models: int = 5, vocab: int = 70) -> tuple[Tensor, Tensor]:
    private, public = cases.logits(seed, models, 3, vocab, 2.0, 0.8)
    private[1, :, 7], private[2, 1, 9] = -math.inf, 12.0
    private[3] = public
    return private, public


def clip(private: Tensor, public: Tensor, **options: object) -> Clipping:
    given: dict = {"lower": LOWER, "upper": UPPER, "orders": ORDERS} | options
    return adapmixed_ext.clip_project(private, public, **given)


def charges(clipping: Clipping) -> Tensor:
    assert clipping.charge is not None
    return clipping.charge


def test_no_feasible_distribution_is_nearer() -> None:
    """No random x with c q <= x <= C q has a smaller KL(p||x) or KL(x||p)."""
    private, public = rows()
    private[1, :, 7] = -3.0
    p, q = private.double().softmax(-1), public.double().softmax(-1)
    bar = reference.clip_project(private, public, lower=LOWER, upper=UPPER)
    for k in range(len(private)):
        got = clip(private[k : k + 1], public)
        mixed = adapmixed_ext.mixture(private[k : k + 1], public, got)
        torch.testing.assert_close(mixed, bar[k], rtol=1e-9, atol=0.0)
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
            q = public.double().softmax(-1)
            mixture = adapmixed_ext.mixture(private, public, none)
            torch.testing.assert_close(mixture, q, rtol=1e-12, atol=0.0)


def test_a_charge_depends_on_its_own_row_alone(isa: str) -> None:
    private, public = rows()
    for box in ((LOWER, UPPER), (0.0, 50.0), (0.9, 1e30)):
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


def test_permutations_and_constants() -> None:
    private, public = rows()
    got = clip(private, public)
    tokens = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    models = torch.tensor([4, 0, 3, 1, 2])
    turned = clip(private[models][..., tokens], public[:, tokens])
    moved = clip(private + 16.0, public - 8.0)
    for other, name in ((turned, "turned"), (moved, "moved")):
        for field in ("log_scale", "residual", "charge"):
            value, truth = getattr(other, field), getattr(got, field)
            truth = truth[models] if name == "turned" else truth
            torch.testing.assert_close(value, truth, rtol=1e-5, atol=1e-5)
    mixture = adapmixed_ext.mixture(private, public, got)
    other = adapmixed_ext.mixture(private[models][..., tokens], public[:, tokens], turned)
    torch.testing.assert_close(other, mixture[:, tokens], rtol=1e-9, atol=0.0)


@pytest.mark.parametrize("box", [(LOWER, UPPER), (0.5, 2.0), (0.9, 1e6), (0.01, 30.0)])
def test_what_the_operators_make_of_it(box: tuple[float, float], isa: str) -> None:
    private, public = rows(seed=5)
    public[1, 11] = private[:, 1, 11] = -math.inf
    public[2, 12] = -math.inf
    public[0, 13] = -900.0
    active = torch.rand(5, 3, generator=torch.Generator().manual_seed(3)) < 0.7
    targets = torch.tensor([7, 11, 69])
    for mask in (None, active):
        got = clip(private, public, lower=box[0], upper=box[1], active=mask)
        truth = reference.mixture(private, public, got)
        mixture = adapmixed_ext.mixture(private, public, got)
        torch.testing.assert_close(mixture, truth, rtol=1e-9, atol=1e-300)
        q = public.double().softmax(-1)
        inside = (mixture >= box[0] * q * (1 - 1e-12)) & (mixture <= box[1] * q * (1 + 1e-12))
        assert inside.all()
        log_prob = adapmixed_ext.log_prob(private, public, got, targets)
        picked = mixture.gather(1, targets[:, None])[:, 0].log()
        torch.testing.assert_close(log_prob, picked, rtol=1e-12, atol=1e-9)
        for adjacency in ("add_remove", "zero_out"):
            for slots in (5, 8):
                options: dict = {"adjacency": adjacency, "num_models": slots, "orders": [3.0, 18.0]}
                loss = adapmixed_ext.leave_one_out(private, public, got, **options)
                exact = reference.leave_one_out(private, public, got, **options)
                torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-12)


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
                    value = values[i, b, k].item()
                    error = adapmixed_ext.loss_error * exact + mp.mpf(1e-12)
                    assert abs(value - exact) <= error, (adjacency, i, b, order)


def test_inactive_slots_answer_the_public_row() -> None:
    private, public = rows()
    got = clip(private, public)
    none = replace(got, active=torch.zeros(5, 3, dtype=torch.bool))
    q = public.double().softmax(-1)
    mixture = adapmixed_ext.mixture(private, public, none)
    torch.testing.assert_close(mixture, q, rtol=1e-12, atol=0.0)
    for adjacency in ("add_remove", "zero_out"):
        loss = adapmixed_ext.leave_one_out(
            private, public, none, orders=ORDERS, adjacency=adjacency
        )
        assert (loss == 0).all()


def test_identical_models_lose_nothing() -> None:
    private, public = rows(models=4)
    same = private[:1].expand(4, 3, 70)
    loss = adapmixed_ext.leave_one_out(same, public, clip(same, public), orders=ORDERS)
    assert (loss == 0).all()


def test_an_empty_batch_and_single_tokens() -> None:
    got = clip(torch.zeros(3, 0, 5), torch.zeros(0, 5))
    assert got.log_scale.shape == (3, 0) and charges(got).shape == (3, 0, len(ORDERS))
    assert clip(torch.zeros(3, 2, 5), torch.zeros(2, 5), orders=None).charge is None
    one = clip(torch.full((2, 1, 1), 3.0), torch.full((1, 1), -4.0))
    assert (charges(one) <= 1e-20).all()
    p = adapmixed_ext.mixture(torch.full((2, 1, 1), 3.0), torch.full((1, 1), -4.0), one)
    assert p.item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("lower", [0.0, 0.5, 0.999999, 1.0 - 1e-9])
def test_rows_far_apart_in_the_widest_box_sum_to_one(lower: float) -> None:
    """Rows with log-ratios in the thousands sum to 1, also if a row lacks tokens.

    With C from 1e95 on, some sums missed 1 by 1e-6; such C now raise an error.
    """
    generator = torch.Generator().manual_seed(9)
    for case in range(200):
        vocab, spread = (2, 5, 50, 1000)[case % 4], (30.0, 300.0, 1000.0, 5000.0)[case // 4 % 4]
        private, public = (spread * torch.randn(1, vocab, generator=generator) for _ in "pq")
        for row in (private, public)[: case % 3]:
            absent = torch.rand(1, vocab, generator=generator) < 0.3
            if not absent.all():
                row[absent] = -math.inf
        clipping = adapmixed_ext.clip_project(private[None], public, lower=lower, upper=1e60)
        p = adapmixed_ext.mixture(private[None], public, clipping)
        log_scale = abs(clipping.log_scale.item())
        rounded = abs(clipping.public_lse.item()) + (log_scale if log_scale < math.inf else 0.0)
        missed = abs(p.sum().item() - 1.0)
        assert missed <= 1e-12 + 2.0**-52 * rounded, (case, vocab, spread)
