"""Noisy aggregation: the members' mean on the public top tokens, with Gaussian noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.limits import check_count, check_number, check_sigma
from adapmixed.mechanisms import Rows
from adapmixed.privacy import GaussianScreening, PublicAnswer
from adapmixed.privacy.accountant import Account, Settings
from adapmixed.privacy.guarantee import fixed_epsilon
from adapmixed.privacy.planner import largest_within
from adapmixed_ext.inputs import likeliest
from adapmixed_ext.types import RandomSource
from adapmixed_lab.baselines.given import Baseline, GivenToken, answered, unprotected

ROUNDING = 1e-6
"""Relative widening of the accounted sensitivity. Each mean is within 1e-11 of the exact one in L2,
and the sensitivity √2/N is at least 2e-5."""


@dataclass(frozen=True)
class NoisyAggregation(Baseline):
    """Gaussian noise on the mean of the members' probabilities, with a fixed (ε, δ).

    This is the core of SeqPATE (Tian et al. 2022) and of few-shot generation (Tang et al. 2024).
    The k likeliest tokens K come from the public row. The members' mean m on K gets independent
    noise N(0, σ²). Negative values become 0, and the rest is scaled to the sum 1. If nothing is
    left, the public probabilities on K are taken. The token is drawn from `weight` times that, plus
    1 − `weight` times the public distribution.

    **Sensitivity.** K follows from public values, so it is the same for neighbours. Let x and y be
    the rows of one member on K, before and after it changed. Neither is scaled after the
    restriction. Their entries are not negative and sum to at most 1. So ‖x‖₂ ≤ ‖x‖₁ ≤ 1 and
    x·y ≥ 0. Hence ‖x − y‖² ≤ ‖x‖² + ‖y‖² ≤ 2, and m moves by at most √2/N in L2. This holds for
    zero-out, in which y is the public row on K, and for replace-one, in which y is any row.

    **Guarantee.** A query is a Gaussian mechanism with sensitivity √2/N, the `GaussianScreening` of
    weight 1. All that follows is post-processing. T queries are μ-Gaussian DP with
    μ = √(2T)/(Nσ), exactly, also if contexts depend on earlier answers (Dong, Roth and Su 2022).
    T must be fixed in advance.

    **Not covered.** The theorem is about real Gaussian noise. The float64 noise is Box-Muller's
    from 53-bit words: it ends at 8.57 σ, and low digits of a noisy vector could reveal the mean
    (Mironov 2012). Only the token leaves, but that this closes the gap is not proved.

    Attributes:
        sigma: σ ≥ 1e-6.
        top_k: k ≥ 1.
        weight: in [0, 1], share of the noisy vector in the answer; 1 as published. Below 1 no token
            that the public model allows has probability 0.
    """

    name: ClassVar[str] = "noisy-aggregation"

    sigma: float
    top_k: int = 100
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        check_count("top_k", self.top_k)
        check_number("weight", self.weight, least=0.0, most=1.0)

    @staticmethod
    def planned(
        epsilon: float, delta: float, num_models: int, queries: int, top_k: int = 100
    ) -> NoisyAggregation:
        """Return the mechanism with the least noise for (ε, δ), from public numbers alone.

        Its weight is 1/(1 + kσ²): it minimises the expected squared error if the mean lies at
        distance 1 from the public vector, which is the size of the noise kσ² before it is clamped.
        """

        def spent(precision: float) -> float:
            event = GaussianScreening(num_models, queries, 1.0, (1 - ROUNDING) / precision)
            return fixed_epsilon(Account(Settings(delta, None, "zero_out")).added([event]), delta)

        sigma = 1 / largest_within(spent, epsilon, 1e6)
        return NoisyAggregation(sigma, top_k, 1 / (1 + top_k * sigma**2))

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
        models, positions = rows.private.shape[:2]
        inputs, projection = unprotected(rows)
        masked = rows.public.isneginf()
        q = (rows.public.double() - inputs.public_lse[:, None]).exp()
        # The tail's column is no token that could be in K.
        top = likeliest(rows.public[:, : rows.width], min(self.top_k, rows.width))
        # One draw for each position, so that the noise does not depend on the grouping into calls.
        noise = torch.empty(top.shape, dtype=torch.float64)
        for position in range(positions):
            noise[position] = ops.gaussian(top.shape[1], sigma=self.sigma, rng=rng)
        noisy = (_mean_on(rows, projection, top) + noise.to(q.device)).clamp(min=0.0)
        noisy = noisy.masked_fill(masked.gather(1, top), 0.0)
        nothing = noisy.sum(-1, keepdim=True) == 0
        noisy = torch.where(nothing, q.gather(1, top), noisy)
        share = self.weight / noisy.sum(-1, keepdim=True)
        weights = ((1 - self.weight) * q).scatter_add(1, top, share * noisy)
        cost = GaussianScreening(models, positions, 1.0, self.sigma * (1 - ROUNDING))
        # The noisy vector is paid for, and the answer is computed from it and public values.
        return answered(rows, projection, weights, (cost, PublicAnswer(positions)))


def _mean_on(rows: Rows, projection: ops.Projection, top: Tensor) -> Tensor:
    """Return the members' mean probabilities of these (B, k) columns."""
    return ops.mixture(rows.private, rows.public, projection).gather(1, top)
