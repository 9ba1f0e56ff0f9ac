"""InvisibleInk and uniform mixing: every neighbour over a grid, formulas, and planted faults."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from exact import costs, log_probs
from mechanism_cases import GRIDS, everything, hockey_stick, logits, neighbours

from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant, BoundedRangeAnswer, ClippedAnswer
from adapmixed.privacy.conversions import zcdp_to_dp
from adapmixed.privacy.costs import accounted_box, answer_range, clipped_mixing_pair
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import search
from adapmixed_lab.baselines.invisible_ink import InvisibleInk
from adapmixed_lab.baselines.noisy_aggregation import NoisyAggregation
from adapmixed_lab.baselines.uniform_mixing import LARGEST, UniformMixing

every_grid = pytest.mark.parametrize("grid", GRIDS)
every_question = pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
INKS = [InvisibleInk(0.5), InvisibleInk(2.5, 0.7), InvisibleInk(0.25, 3.0), InvisibleInk(0.0)]
MIXTURES = [UniformMixing(weight, 9) for weight in (0.0, 0.01, 0.6, 0.98)]


def pairs(mechanism: Mechanism, grid: str, adjacency: str) -> Any:
    """Yield log p of all ensembles, and of each of their neighbours, (B, V) both."""
    private, public, rows, active = everything(grid)
    here = log_probs(mechanism, private, public, active=active)
    for other in neighbours(private, public, adjacency, rows):
        yield here, log_probs(mechanism, other, public, active=active)


def charged(mechanism: Mechanism, grid: str) -> Any:
    private, public, _, active = everything(grid)
    return costs(mechanism.propose(private, public, rng=SeededRandom(0), active=active))[0]


def widest(mechanism: InvisibleInk, grid: str, adjacency: str) -> float:
    """Return the largest range of log p/p'."""
    ratios = [here - there for here, there in pairs(mechanism, grid, adjacency)]
    return max(float((one.amax(1) - one.amin(1)).max()) for one in ratios)


@every_grid
@every_question
@pytest.mark.parametrize("mechanism", INKS)
def test_the_range_of_invisible_ink(mechanism: InvisibleInk, grid: str, adjacency: str) -> None:
    event = charged(mechanism, grid)
    assert isinstance(event, BoundedRangeAnswer)
    of = event.scale, event.lower, event.upper, event.num_models, adjacency
    stated, models = answer_range(*of), GRIDS[grid][1]
    ratio = 2 * mechanism.clip / (models * mechanism.temperature)
    assert stated == pytest.approx(ratio * (2 if adjacency == "replace_one" else 1), rel=1e-8)
    found = widest(mechanism, grid, adjacency)
    # A tail's token differs from the others in float32; what is charged is the column.
    assert found <= stated + (1e-6 if grid in ("tail", "active") else 1e-13)
    if grid == "V3-N2" and 0 < mechanism.clip < 1:  # wide rows, in which it is attained
        assert found >= 0.99 * stated
        broken = replace(mechanism, clip=1.01 * mechanism.clip)  # a planted fault
        assert widest(broken, grid, adjacency) > stated


def test_the_formula_and_the_papers_cost() -> None:
    """Also with constants added to rows: a clip of raw logits feels them."""
    private, public = logits(6)
    private += torch.tensor([0.0, 0.3, -5.0])[:, None, None]
    public[:, 5], private[0, :, 5], private[1, :, 1] = -math.inf, -math.inf, -math.inf
    mechanism = InvisibleInk(0.8, 1.7)
    difference = (private.double() - public.double()).clamp(-0.8, 0.8).nan_to_num(0.0)
    expected = ((public.double() + difference.mean(0)) / 1.7).log_softmax(-1)
    found = log_probs(mechanism, private, public)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-11)
    # The package `invink` 0.1.0 charges this; the accountant's composition is never above it.
    rho = mechanism.rho(40)
    assert rho == pytest.approx(0.5 * (0.8 / (40 * 1.7)) ** 2)
    for queries in (1, 100, 5000):
        spent = Accountant(1e-6).add([BoundedRangeAnswer(1 / 1.7, -0.8, 0.8, 40, queries)])
        assert spent.guarantee().epsilon <= zcdp_to_dp(queries * rho * (1 + 1e-6), 1e-6)


@every_grid
@every_question
@pytest.mark.parametrize("mechanism", MIXTURES)
def test_the_ratio_of_uniform_mixing(mechanism: UniformMixing, grid: str, adjacency: str) -> None:
    event, (vocab, models, *_) = charged(mechanism, grid), GRIDS[grid]
    assert isinstance(event, ClippedAnswer) and event.num_models == 1
    pure = mechanism.pure_epsilon(models, vocab)
    assert (event.lower, event.upper) == (math.exp(-pure), math.exp(pure))
    pair = clipped_mixing_pair(*accounted_box(event.lower, event.upper), 1, adjacency)
    p, q = np.array(pair.p), np.array(pair.q)
    worst = 0.0
    for here, there in pairs(mechanism, grid, adjacency):
        worst = max(worst, float((here - there).abs().max()))
        for epsilon in (0.0, 0.1, 1.0):
            assert hockey_stick(here, there, epsilon) <= search.hockey_stick(p, q, epsilon) + 1e-12
    assert worst <= pure + 1e-6 * (grid in ("tail", "active")) + 1e-13
    if grid == "V2-N1":  # whose rows are all but points, so that the bound is nearly attained
        assert worst >= 0.85 * pure
        broken = pairs(replace(mechanism, weight=0.99), grid, adjacency)
        assert max(float((here - there).abs().max()) for here, there in broken) > pure


def test_the_formula_of_uniform_mixing_also_with_a_mask() -> None:
    private, public = logits(4)
    p = private.double().softmax(-1).mean(0)
    found = log_probs(UniformMixing(0.25, 1), private, public).exp()
    torch.testing.assert_close(found, 0.25 * p + 0.75 / 6, rtol=1e-12, atol=0.0)
    public[:, 0] = -math.inf
    p = private[..., 1:].double().softmax(-1).mean(0)  # members do not speak about it
    found = log_probs(UniformMixing(0.25, 1), private, public).exp()
    torch.testing.assert_close(found[:, 1:], 0.25 * p + 0.75 / 5, rtol=1e-12, atol=0.0)
    assert bool((found[:, 0] == 0).all())


def test_bad_settings() -> None:
    """Beyond these a sum is not exact, a token leaves float64, or no bound holds."""
    for make, name in (
        (lambda: InvisibleInk(33.0), "clip"),
        (lambda: InvisibleInk(1.0, 0.1), "temperature"),
        (lambda: UniformMixing(1.0, 1), "weight"),
        (lambda: NoisyAggregation(0.0), "sigma"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            make()
    with pytest.raises(ValueError, match=f"weight must cost at most ε₀ = {LARGEST:.4g} an answer"):
        UniformMixing(0.999, 1).propose(*logits(1), rng=SeededRandom(0))
