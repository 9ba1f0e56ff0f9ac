"""Uniform mixing: a member's distribution, or the mean of several, mixed with the uniform one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

import adapmixed_ext as ops
from adapmixed.limits import MOST_BOX, check_number, check_queries
from adapmixed.mechanisms import Rows
from adapmixed.privacy import ClippedAnswer
from adapmixed.privacy.composition import PLANNED_POINTS, clipped_mixing_epsilon
from adapmixed.privacy.conversions import up
from adapmixed.privacy.planner import largest_within
from adapmixed_ext.types import RandomSource
from adapmixed_lab.baselines.given import Baseline, GivenToken, answered, unprotected

LARGEST = math.log(MOST_BOX) / 2
"""Largest pure ε of one answer that is accounted."""


@dataclass(frozen=True)
class UniformMixing(Baseline):
    """λ p + (1 − λ)/V with p the mean of the members: pure ε for each token.

    Published with one model of all private text (Majmudar et al. 2022); N members divide the cost.

    **Guarantee.** If one member changes in any way, p changes by at most 1/N at each token, and the
    answer is at least (1 − λ)/V there. So the ratio of both answers is at most
    1 + λV/(N(1 − λ)) = e^ε₀ at each token, in both orders, for zero-out and for replace-one. Two
    distributions whose ratio lies in [e^−ε₀, e^ε₀] are P and Q of a box of one member around Q:
    the `ClippedAnswer` with this box and N = 1. Its dominating pair is randomised response, the
    worst of all ε₀-DP answers (Kairouz, Oh and Viswanath 2015). For replace-one the accountant's
    pair of that event is wider than needed. The event's widening of the box covers rounding.

    Tokens that the public model masks have no share. The tail of rare tokens gets the uniform mass
    of all its tokens, which keep their public proportions.

    Attributes:
        weight: λ in [0, 1), such that ε₀ ≤ log(1000).
        queries: T in [1, 2^40], number of queries that the guarantee is planned for.
    """

    name: ClassVar[str] = "uniform-mixing"

    weight: float
    queries: int

    def __post_init__(self) -> None:
        if check_number("weight", self.weight, least=0.0) >= 1:
            raise ValueError(f"weight must be in [0, 1), got {self.weight!r}")
        check_queries(self.queries)

    @staticmethod
    def planned(
        epsilon: float, delta: float, num_models: int, queries: int, vocab_size: int
    ) -> UniformMixing:
        """Return the mechanism with the largest weight for (ε, δ), from public numbers alone."""

        def cost(pure: float) -> float:
            of = math.exp(-pure), math.exp(pure), 1, queries, delta, "zero_out"
            return clipped_mixing_epsilon(*of, points=PLANNED_POINTS)

        pure = largest_within(cost, epsilon, LARGEST * (1 - 1e-9))
        odds = math.expm1(pure) * num_models / vocab_size * (1 - 1e-9)
        return UniformMixing(odds / (1 + odds), queries)

    def pure_epsilon(self, num_models: int, vocab_size: int) -> float:
        """Return ε₀ of one answer of N members over V tokens, rounded up.

        Raises:
            ValueError: it is above log(1000).
        """
        odds = up(up(self.weight * vocab_size) / ((1 - self.weight) * (1 - 2.0**-50) * num_models))
        found = up(math.log1p(up(odds))) if self.weight else 0.0
        if found > LARGEST:
            raise ValueError(
                f"weight must cost at most ε₀ = {LARGEST:.4g} an answer, got {self.weight!r}, "
                f"which costs {found:.4g} with {num_models} members and {vocab_size} tokens"
            )
        return found

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
        models, positions = rows.private.shape[:2]
        pure = self.pure_epsilon(models, rows.vocab_size)
        _, projection = unprotected(rows)
        count = torch.ones_like(rows.public, dtype=torch.float64)
        if rows.tail is not None:
            count[:, -1] = (~rows.tail.isneginf()).sum(-1)
        count = count.masked_fill(rows.public.isneginf(), 0.0)
        uniform = count / count.sum(-1, keepdim=True)
        mean = ops.mixture(rows.private, rows.public, projection)
        weights = self.weight * mean + (1 - self.weight) * uniform
        event = ClippedAnswer(math.exp(-pure), math.exp(pure), 1, positions, self.queries)
        return answered(rows, projection, weights, (event,))
