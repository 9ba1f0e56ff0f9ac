"""log_pool, beyond what test_operators.py checks: its properties, and attacks on its guarantee.

Without member i, log p moves by a range of at most (scale/N) span_i, and span_i is at most the
width of the box. Rounding adds no more than stated.
"""

from __future__ import annotations

import math
from fractions import Fraction

import cases
import fuzzed
import plans
import pytest
import reports
import torch
from oracle import array, log_sum_exp
from plans import Setting
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import LogPool
from adapmixed_ext.inputs import near_log_sum_exp

USUAL = plans.POOLS[0]
# The errors stated in csrc for one log-sum-exp in floats, and one in doubles.
FLOAT_SUM = 5.3 * 2.0**-24
DOUBLE_SUM = 5e-14


def pool_of(private: Tensor, public: Tensor, setting: Setting = USUAL, **more: object) -> LogPool:
    options = {**setting.options(private.shape[0]), **more}
    return adapmixed_ext.log_pool(private, public, **options)


def test_slots_that_are_inactive_or_absent_have_no_part(device: torch.device) -> None:
    private, public = plans.logits(60, 6, 3, 300, 2.0, 0.7)
    private, public = private.to(device), public.to(device)
    active = torch.tensor([[True] * 3, [False] * 3, [True, False, True]] * 2, device=device)
    emptied = torch.where(active.unsqueeze(-1), private, public)
    some = pool_of(private, public, active=active)
    for pool, rows in ((some, private), (pool_of(emptied, public), emptied)):
        p = adapmixed_ext.mixture(rows, public, pool)
        log_prob = adapmixed_ext.log_prob(rows, public, pool, torch.arange(3, device=device))
        for b in range(3):
            present = private[active[:, b], b : b + 1].contiguous()
            single = pool_of(present, public[b : b + 1], num_models=6)
            assert torch.equal(single.log_normaliser[0], pool.log_normaliser[b])
            row = adapmixed_ext.mixture(present, public[b : b + 1], single)
            assert torch.equal(row[0], p[b])
            torch.testing.assert_close(log_prob[b], p[b, b].log(), rtol=1e-13, atol=0.0)
    # The span of an inactive member is known before it takes part.
    assert torch.equal(some.span, pool_of(private, public).span)
    none = pool_of(private, public, active=torch.zeros_like(active))
    q = torch.softmax(public.double(), -1)
    torch.testing.assert_close(adapmixed_ext.mixture(private, public, none), q)


def test_the_order_of_models_does_not_change_a_bit(device: torch.device) -> None:
    private, public = plans.logits(62, 9, 2, 3000, 2.0, 0.7)
    private, public = private.to(device), public.to(device)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(3))
    first, other = pool_of(private, public), pool_of(private[order], public)
    assert torch.equal(first.log_normaliser, other.log_normaliser)
    assert torch.equal(first.span[order], other.span)
    mixtures = [
        adapmixed_ext.mixture(rows, public, pool)
        for rows, pool in ((private, first), (private[order], other))
    ]
    assert torch.equal(*mixtures)
    for copies in (2, 4, 8):  # the mean of equal models is exactly one log-ratio
        copied = pool_of(private[:1].expand(copies, 2, 3000), public)
        assert torch.equal(copied.log_normaliser, pool_of(private[:1], public).log_normaliser)
        assert torch.equal(copied.span, first.span[:1].expand(copies, 2))


def test_known_log_sum_exps_are_taken(isa: str) -> None:
    private, public = plans.logits(12, 5, 2, 300, 2.0, 1.0)
    private[3] = public
    exact = [rows.double().logsumexp(-1) for rows in (private, public)]
    differences = exact[0] - exact[1]
    pool = pool_of(private, public, lse_differences=differences)
    torch.testing.assert_close(pool.private_lse, exact[0], rtol=0.0, atol=1e-12)
    assert torch.equal(pool.private_lse[3], pool.public_lse)
    other = pool_of(private, public)
    torch.testing.assert_close(pool.log_normaliser, other.log_normaliser, rtol=0.0, atol=2e-6)
    with pytest.raises(ValueError, match="lse_differences must be torch.float64 of shape"):
        pool_of(private, public, lse_differences=differences.float())


# The guarantee.


def attack(private: Tensor, public: Tensor, setting: Setting, without: str) -> int:
    models = private.shape[0]
    pool = pool_of(private, public, setting)
    log_p = adapmixed_ext.mixture(private, public, pool).log()
    compared = 0
    for i in {0, models - 1}:
        rows, active = private, torch.ones(private.shape[:2], dtype=torch.bool)
        if without == "inactive":
            active[i] = False
        else:
            rows = private.clone()
            rows[i] = public
        other = pool_of(rows, public, setting, active=active)
        moved = log_p - adapmixed_ext.mixture(rows, public, other).log()
        for b in range(public.shape[0]):
            span = Fraction(pool.span[i, b].item())
            assert span <= Fraction(setting.upper) - Fraction(setting.lower)
            bound = float(span) * setting.scale / (models + setting.extra)
            counted = (log_p[b] > reports.NORMAL) & moved[b].isfinite()
            change = moved[b][counted]
            if change.numel():
                depth = -torch.log_softmax(public[b].double(), -1)[counted].min().item()
                slack = 2.0**-49 * (1.0 + setting.scale * setting.reach + depth)
                assert (change.max() - change.min()).item() <= bound + slack, (i, b)
                compared += 1
            # The support must not change.
            absent = torch.isneginf(public[b])
            assert torch.isneginf(log_p[b][absent]).all()
    return compared


@pytest.mark.parametrize("without", ["inactive", "public"])
@pytest.mark.parametrize("setting", plans.POOLS, ids=str)
@pytest.mark.slow
def test_emptying_a_slot_stays_within_its_span(setting: Setting, without: str, isa: str) -> None:
    compared = 0
    for case in (*cases.small(), *cases.corners(), *cases.offsets(), *cases.wide()):
        compared += attack(case.private, case.public, setting, without)
    for seed in range(12):
        case, _ = fuzzed.fuzzed(seed)
        at = torch.randint(4, case.private.shape, generator=torch.Generator().manual_seed(seed))
        edges = torch.tensor([setting.lower, setting.upper, 0.5, -2.0])[at]
        noise = 1 + 1e-7 * torch.randn(at.shape, generator=torch.Generator().manual_seed(seed))
        compared += attack(case.private, case.public, setting, without)
        near_the_bounds = case.public.float() + edges * noise
        compared += attack(near_the_bounds, case.public.float(), setting, without)
    assert compared > 60


def test_the_bound_is_attained() -> None:
    """A model at both ends of the box has the span and the range of the whole box."""
    public = torch.zeros(1, 4)
    private = public.expand(5, 1, 4).clone()
    private[2, 0, 0], private[2, 0, 1] = 8.0, -8.0
    pool = pool_of(private, public)
    assert pool.span[2].item() == 1.25 and (pool.span[[0, 1, 3, 4]] == 0).all()
    active = torch.ones(5, 1, dtype=torch.bool)
    active[2] = False
    other = pool_of(private, public, active=active)
    moved = adapmixed_ext.mixture(private, public, pool).log()
    moved -= adapmixed_ext.mixture(private, public, other).log()
    assert abs((moved.max() - moved.min()).item() - 1.25 * 2.0 / 5) < 1e-14
    for without in ("inactive", "public"):
        assert attack(private, public, USUAL, without) > 0


@pytest.mark.parametrize("bounds", [(-0.1, 0.3), (-1 / 3, 2 / 3), (-1e-13, 1e-13)])
def test_bounds_that_are_no_multiples_are_kept(bounds: tuple[float, float]) -> None:
    """The clip bounds on the grid lie inside the given ones."""
    public, private = torch.zeros(1, 3), torch.tensor([[[9.0, -9.0, 0.0]]])
    for lower, upper in ((bounds[0], 0.0), (0.0, bounds[1]), bounds):
        pool = pool_of(private, public, Setting(lower, upper, 1.0, 6))
        width = Fraction(upper) - Fraction(lower)
        assert width - 2 * Fraction(2) ** -39 < Fraction(pool.span.item()) <= width


def test_sums_near_a_column(isa: str) -> None:
    """They are as good as the pool's, or NaN, whatever the other rows are."""
    rows = 3 * torch.randn(4, 2, 300, generator=torch.Generator().manual_seed(11))
    near = rows[0].argmax(-1)
    rows[1].scatter_(1, near[:, None], -math.inf)
    rows[2, 0, 7] = math.nan
    sums = near_log_sum_exp(rows, near)
    assert sums[1].isnan().all() and sums[2].isnan().tolist() == [True, False]
    exact = torch.from_numpy(log_sum_exp(array(rows[[0, 3]])).astype(float))
    assert (sums[[0, 3]] - exact).abs().max().item() <= FLOAT_SUM
    assert torch.equal(near_log_sum_exp(rows[3], near), sums[3])


def test_log_sum_exps_in_single_and_in_double(isa: str) -> None:
    for case in cases.summed():
        exact = log_sum_exp(array(case.private))
        sums = array(pool_of(case.private, case.public).private_lse)
        most = abs(sums - exact).max()
        if case.name.startswith("one-sided"):
            assert most <= 2 * FLOAT_SUM
            assert case.name != "one-sided" or most > 0.1 * FLOAT_SUM  # floats were used
        elif case.name.startswith("no-floats"):
            assert most <= DOUBLE_SUM + 5e-16 * abs(exact).max()
