"""Attacks on the bound behind the pool's guarantee.

Without member i, log p moves by a range of at most (scale/N) span_i, and span_i is at most the
width of the box. Rounding adds no more than stated.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction

import cases
import pools
import pytest
import torch
from pools import SETTINGS, Setting
from torch import Tensor

import adapmixed_ext


def rows(seed: int) -> tuple[Tensor, Tensor]:
    """Return random ensembles, some of which try to exceed the bound.

    Those have extremes at one token, masks, huge offsets, or models that all agree but one.
    """
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    models, vocab = choose.choice((1, 2, 3, 8, 33)), choose.choice((2, 5, 40, 1100))
    spread = choose.choice((0.1, 3.0, 30.0))
    public = spread * torch.randn(2, vocab, generator=generator)
    private = public + choose.choice((1e-6, 0.3, 5.0)) * torch.randn(
        models, 2, vocab, generator=generator
    )
    kind = choose.randrange(6)
    if kind == 1:  # one model against all others
        private = public.expand(models, 2, vocab).clone()
        private[0, :, 0] += 60.0
    elif kind == 2:  # half of the tokens gone, another half raised
        private[0, :, ::2] = -math.inf
        private[0, :, 1::2] += 9.0
        private[0, :, -1] = 0.0
    elif kind == 3:
        private[::2] += 3e4
        public = public - 3e4
    elif kind == 4 and vocab > 2:
        public[:, 1] = -math.inf
        private[..., 2] -= 700.0
    elif kind == 5:  # close to the bounds of the box
        choices = torch.tensor([-0.25, 1.0, 0.5, -2.0])
        at = torch.randint(4, private.shape, generator=generator)
        private = public + choices[at] * (
            1 + 1e-7 * torch.randn(private.shape, generator=generator)
        )
    return private, public


def log_probabilities(private: Tensor, public: Tensor, pool: adapmixed_ext.LogPool) -> Tensor:
    """Return log p from both operators, mixture and log_prob, each (B, V)."""
    positions, vocab = public.shape
    tokens = range(vocab) if vocab <= 40 else [*range(20), *range(vocab - 20, vocab)]
    logs = adapmixed_ext.mixture(private, public, pool).log()
    exact = torch.full_like(logs, math.nan)
    for v in tokens:
        exact[:, v] = adapmixed_ext.log_prob(private, public, pool, torch.full((positions,), v))
    return torch.stack([logs, exact])


def check(private: Tensor, public: Tensor, setting: Setting, without: str) -> int:
    models = private.shape[0]
    options = setting.options(models)
    pool = adapmixed_ext.log_pool(private, public, **options)
    log_p = log_probabilities(private, public, pool)
    compared = 0
    for i in {0, models - 1}:
        if without == "inactive":
            active = torch.ones(models, public.shape[0], dtype=torch.bool)
            active[i] = False
            other_rows = private
            other = adapmixed_ext.log_pool(private, public, active=active, **options)
        else:
            other_rows = private.clone()
            other_rows[i] = public
            other = adapmixed_ext.log_pool(other_rows, public, **options)
        moved = log_p - log_probabilities(other_rows, public, other)
        for b in range(public.shape[0]):
            span = Fraction(pool.span[i, b].item())
            assert span <= Fraction(setting.upper) - Fraction(setting.lower)
            bound = float(span) * setting.scale / options["num_models"]
            for way in (0, 1):
                counted = (log_p[way, b] > pools.NORMAL) & moved[way, b].isfinite()
                known = moved[way, b][counted]
                if not known.numel():
                    continue
                log_q = torch.log_softmax(public[b].double(), -1)[counted]
                slack = pools.rounding(setting, -log_q.min().item())
                assert (known.max() - known.min()).item() <= bound + slack, (i, b, way)
                compared += 1
            # The support must not change.
            support = torch.isneginf(public[b])
            assert torch.equal(torch.isneginf(log_p[0, b]) & support, support)
    return compared


@pytest.mark.parametrize("without", ["inactive", "public"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.slow
def test_emptying_a_slot_stays_within_its_span(setting: Setting, without: str, isa: str) -> None:
    compared = 0
    for seed in range(24):
        compared += check(*rows(seed), setting, without)
    assert compared > 60


def test_the_bound_is_attained() -> None:
    """A model at both ends of the box has the span and the range of the whole box."""
    public = torch.zeros(1, 4)
    private = public.expand(5, 1, 4).clone()
    private[2, 0, 0], private[2, 0, 1] = 8.0, -8.0
    setting = SETTINGS[0]
    options = setting.options(5)
    pool = adapmixed_ext.log_pool(private, public, **options)
    assert pool.span[2].item() == 1.25 and (pool.span[[0, 1, 3, 4]] == 0).all()
    active = torch.ones(5, 1, dtype=torch.bool)
    active[2] = False
    other = adapmixed_ext.log_pool(private, public, active=active, **options)
    moved = adapmixed_ext.mixture(private, public, pool).log()
    moved -= adapmixed_ext.mixture(private, public, other).log()
    assert abs((moved.max() - moved.min()).item() - 1.25 * 2.0 / 5) < 1e-14


def test_a_span_is_a_multiple_of_the_grid_and_its_row_s_own(isa: str) -> None:
    """A span does not depend on the other rows, or on whether the member takes part."""
    private, public = cases.logits(70, 40, 1, 777, 3.0, 1.0)
    setting = Setting(-0.25, 1.0, 2.0)
    options = setting.options(40)
    span = adapmixed_ext.log_pool(private, public, **options).span
    own = adapmixed_ext.log_pool(private[3:4], public, **options).span
    assert own.item() == span[3].item()
    inactive = torch.zeros(40, 1, dtype=torch.bool)
    assert torch.equal(adapmixed_ext.log_pool(
        private, public, active=inactive, **options).span, span)  # fmt: skip
    units = span / setting.unit(40)
    assert torch.equal(units, units.round()) and (units > 0).all()


@pytest.mark.parametrize("bounds", [(-0.1, 0.3), (-1 / 3, 2 / 3), (-1e-13, 1e-13)])
def test_bounds_that_are_no_multiples_are_kept(bounds: tuple[float, float]) -> None:
    """The clip bounds on the grid lie inside the given ones."""
    public = torch.zeros(1, 3)
    private = torch.tensor([[[9.0, -9.0, 0.0]]])
    for lower, upper in ((bounds[0], 0.0), (0.0, bounds[1]), bounds):
        pool = adapmixed_ext.log_pool(
            private, public, lower=lower, upper=upper, scale=1.0, num_models=7
        )
        width = Fraction(upper) - Fraction(lower)
        assert width - 2 * Fraction(2) ** -39 < Fraction(pool.span.item()) <= width
