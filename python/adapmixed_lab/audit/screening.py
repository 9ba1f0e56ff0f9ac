"""Screening: the bit of AdaPMixED in two worlds, against its Gaussian cost.

There are two tokens, the public model is sure of the first, and the threshold is the divergence of
a fair coin. The bit then says on which side of s(0) = s(1) the noisy scores lie, which is the best
test of a shift in this direction. With λ_s/σ of the order of 1, a few thousand draws show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy.conversions import gdp_to_dp
from adapmixed.privacy.costs.adapmixed import screening_rho
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit.finding import Effort, Finding
from adapmixed_lab.audit.search import answers
from adapmixed_lab.audit.statistics import CONFIDENCE, least_epsilon, least_shift

BITS_PER_SECOND = 600.0  # of each setting, in each world
CHUNK = 4096
DELTA = 0.01
ORDER = 2.0
RARE = 0.02  # q of the second token
Count = Callable[[int, int], int]


def coin_threshold(rare: float, order: float) -> float:
    """Return D_order((½, ½) ‖ (1 - rare, rare))."""
    terms = ((1 - rare) ** (1 - order), rare ** (1 - order))
    return math.log(0.5**order * math.fsum(terms)) / (order - 1)


def passed(
    mechanism: AdaPMixED, private: Tensor, public: Tensor, count: int, rng: RandomSource
) -> int:
    """Return how many of `count` queries pass the screening."""
    found = answers(mechanism, private, public, count, rng, CHUNK)
    return sum(int((~answer.public).sum()) for answer in found)


def rescaled_first(
    scores: np.ndarray, base: np.ndarray, mechanism: AdaPMixED, draws: int, rng: np.random.Generator
) -> int:
    """Return how many queries pass if s[K] is scaled before the noise, as published."""
    noise = rng.normal(0, mechanism.sigma, (draws, len(scores)))
    noisy = np.maximum(scores / scores.sum() + noise, 0.0)
    total = noisy.sum(1, keepdims=True)
    share = noisy / np.where(total > 0, total, 1.0)
    order = mechanism.order
    with np.errstate(divide="ignore"):
        divergence = np.log((share**order * base ** (1 - order)).sum(1)) / (order - 1)
    return int(((total[:, 0] > 0) & (divergence <= mechanism.threshold)).sum())


def settings() -> list[tuple[AdaPMixED, int]]:
    """Return all pairs (mechanism, N) that are attacked."""
    threshold = coin_threshold(RARE, ORDER)

    def one(weight: float, sigma: float) -> AdaPMixED:
        return AdaPMixED(
            ORDER, 0.01, screen_weight=weight, sigma=sigma, threshold=threshold, screen_top_k=2
        )

    return [(one(0.5, 0.5), 1), (one(1.0, 0.4), 2), (one(1.0, 0.2), 5)]


def counts(mechanism: AdaPMixED, models: int, rng: RandomSource) -> Count:
    """Return a function (world, draws) -> passed bits; in world 1 member 0 is emptied."""
    public = torch.tensor([[math.log1p(-RARE), math.log(RARE)]])
    here = torch.tensor([-60.0, 60.0]).expand(models, 1, 2).clone()
    # The other members keep the scores half-way between the two worlds near the fair coin.
    weight = mechanism.screen_weight
    for row in range(1, models):
        here[row] = torch.tensor(_others(weight, models))
    there = here.clone()
    there[0] = public

    def count(world: int, draws: int) -> int:
        return passed(mechanism, there if world else here, public, draws, rng)

    return count


def _others(weight: float, models: int) -> list[float]:
    """Return the other members' logits, for which scores are even half-way between the worlds."""
    # s(1) = RARE + (weight/N) (x/2 + (N-1) (o - RARE)) with x = 1 - RARE: solved for o at 1/2.
    needed = (0.5 - RARE) * models / weight - (1 - RARE) / 2
    share = min(max(RARE + needed / (models - 1), 1e-9), 1 - 1e-9)
    return [math.log1p(-share), math.log(share)]


def measure(count: Count, draws: int) -> tuple[float, float]:
    """Return lower bounds on the shift of a Gaussian with these counts, and on ε at `DELTA`."""
    hits = [count(world, draws) for world in (0, 1)]
    best = [0.0, 0.0]
    # Two events, passed or not, in two directions: four tests share the error.
    each = 1 - (1 - CONFIDENCE) / 4
    for counted in (hits, [draws - hit for hit in hits]):
        for first, second in (counted, counted[::-1]):
            pair = (first, draws), (second, draws)
            best[0] = max(best[0], least_shift(*pair, each))
            best[1] = max(best[1], least_epsilon(*pair, DELTA, each))
    return best[0], best[1]


def _findings(
    name: str, mechanism: AdaPMixED, models: int, count: Count, draws: int, control: bool
) -> Iterator[Finding]:
    # ρ = shift²/2 is what is charged.
    rho = screening_rho(mechanism.screen_weight, mechanism.sigma, models)
    claimed = math.sqrt(2 * rho)
    shift, epsilon = measure(count, draws)
    yield Finding("screening", name, "shift √(2ρ) of one bit", claimed, shift, CONFIDENCE, control)
    yield Finding(
        "screening", name, f"Gaussian's ε of one bit at δ = {DELTA:g}",
        gdp_to_dp(claimed, DELTA), epsilon, CONFIDENCE, control,
    )  # fmt: skip


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack the real bit, and a control whose scores are re-scaled before the noise."""
    draws = effort.count(BITS_PER_SECOND, 1000)
    for index, (mechanism, models) in enumerate(settings()):
        rng = effort.source(f"screening/{index}")
        name = f"adapmixed λ = {mechanism.screen_weight:g}, σ = {mechanism.sigma:g}, N = {models}"
        count = counts(mechanism, models, rng)
        yield from _findings(name, mechanism, models, count, draws, False)
    generator = effort.generator("screening/rescaled")
    # Two of a thousand equally likely tokens are screened; one model is sure of one of them.
    vocab, weight = 1000, 0.01
    mechanism = AdaPMixED(
        ORDER, 0.01, screen_weight=weight, sigma=0.2, threshold=0.25, screen_top_k=2
    )
    base = np.array([0.5, 0.5])
    even = np.full(2, 1 / vocab)
    sure = even * (1 - weight) + weight * np.array([1.0, 0.0])

    def broken(world: int, draws: int) -> int:
        scores = even if world else sure
        return rescaled_first(scores, base, mechanism, draws, generator)

    name = f"re-scaled before the noise, λ = {weight:g}, σ = 0.2, N = 1"
    yield from _findings(name, mechanism, 1, broken, 20 * draws, True)
