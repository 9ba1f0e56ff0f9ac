"""Screening: the bit of AdaPMixED in two worlds, against its Gaussian cost.

There are two tokens, the public model is sure of the first, and the threshold is the divergence of
a fair coin. The bit then says on which side of s(0) = s(1) the noisy scores lie, which is the best
test of a shift in this direction. With λ_s/σ of the order of 1, a few thousand draws show it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy.conversions import gdp_to_dp
from adapmixed.privacy.costs import screening_rho
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit import Effort, Finding
from adapmixed_lab.audit.search import CONFIDENCE, Array, drawn, least_shift, neighbour, renyi

BITS_PER_SECOND = 600.0  # of each setting, in each world
DELTA = 0.01
ORDER = 2.0
RARE = 0.02  # q of the second token


def rescaled_first(
    scores: Array, mechanism: AdaPMixED, draws: int, rng: np.random.Generator
) -> int:
    """Return how many queries pass if s[K] is scaled before the noise, as published.

    The public model says that all screened tokens are equally likely.
    """
    noise = rng.normal(0, mechanism.sigma, (draws, len(scores)))
    noisy = np.maximum(scores / scores.sum() + noise, 0.0)
    total = noisy.sum(1, keepdims=True)
    share = noisy / np.where(total > 0, total, 1.0)
    order = mechanism.order
    with np.errstate(divide="ignore"):
        powers = (share**order * len(scores) ** (order - 1)).sum(1)
        divergence = np.log(powers) / (order - 1)
    return int(((total[:, 0] > 0) & (divergence <= mechanism.threshold)).sum())


def _mechanism(weight: float, sigma: float, threshold: float) -> AdaPMixED:
    return AdaPMixED(
        ORDER, 0.01, screen_weight=weight, sigma=sigma, threshold=threshold, screen_top_k=2
    )


def settings() -> list[tuple[AdaPMixED, int]]:
    """Return all pairs (mechanism, N) that are attacked."""
    # The divergence of a fair coin from the public model.
    coin, public = np.array([0.5, 0.5]), np.array([1 - RARE, RARE])
    threshold = float(renyi(coin, public, ORDER))
    pairs = ((0.5, 0.5), 1), ((1.0, 0.4), 2), ((1.0, 0.2), 5)
    return [(_mechanism(*noise, threshold), models) for noise, models in pairs]


def passed(mechanism: AdaPMixED, models: int, draws: int, rng: RandomSource) -> list[int]:
    """Return how many of `draws` queries pass the screening, with member 0 and with it emptied."""
    public = torch.tensor([[math.log1p(-RARE), math.log(RARE)]])
    # The other members keep the scores half-way between the two worlds near the fair coin.
    # s(1) = RARE + (λ/N) (x/2 + (N-1) (o - RARE)) with x = 1 - RARE: solved for o at 1/2.
    needed = (0.5 - RARE) * models / mechanism.screen_weight - (1 - RARE) / 2
    share = min(max(RARE + needed / max(1, models - 1), 1e-9), 1 - 1e-9)
    here = torch.tensor([math.log1p(-share), math.log(share)]).repeat(models, 1, 1)
    here[0] = torch.tensor([-60.0, 60.0])
    worlds = here, neighbour(here, public, public, "zero_out")
    return [int((~drawn(mechanism, world, public, draws, rng)[1]).sum()) for world in worlds]


def measure(hits: list[int], draws: int) -> float:
    """Return a lower bound on the shift of a Gaussian with these counts."""
    # Two events, passed or not, in two directions: four tests share the error.
    each = 1 - (1 - CONFIDENCE) / 4
    passed = [(hit, draws) for hit in hits]
    failed = [(draws - hit, draws) for hit in hits]
    pairs = (passed, passed[::-1], failed, failed[::-1])
    return max(least_shift(here, there, each) for here, there in pairs)


def finding(
    name: str, mechanism: AdaPMixED, models: int, hits: list[int], draws: int, control: bool
) -> Finding:
    """Compare ε of the shift √(2ρ) that is charged with that of the shift that was seen."""
    name += f"λ = {mechanism.screen_weight:g}, σ = {mechanism.sigma:g}, N = {models}"
    charged = math.sqrt(2 * screening_rho(mechanism.screen_weight, mechanism.sigma, models))
    claimed, seen = (gdp_to_dp(shift, DELTA) for shift in (charged, measure(hits, draws)))
    claim = f"Gaussian's ε of one bit at δ = {DELTA:g}"
    return Finding("screening", name, claim, claimed, seen, CONFIDENCE, control)


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack the real bit, and a control whose scores are re-scaled before the noise."""
    draws = effort.count(BITS_PER_SECOND, 1000)
    for index, (mechanism, models) in enumerate(settings()):
        hits = passed(mechanism, models, draws, effort.source(f"screening/{index}"))
        yield finding("adapmixed ", mechanism, models, hits, draws, False)
    generator, draws = effort.generator("screening/rescaled"), 20 * draws
    # Two of a thousand equally likely tokens are screened; one model is sure of one of them.
    vocab, weight = 1000, 0.01
    mechanism = _mechanism(weight, 0.2, 0.25)
    even = np.full(2, 1 / vocab)
    sure = even * (1 - weight) + weight * np.array([1.0, 0.0])
    hits = [rescaled_first(scores, mechanism, draws, generator) for scores in (sure, even)]
    yield finding("re-scaled before the noise, ", mechanism, 1, hits, draws, True)
