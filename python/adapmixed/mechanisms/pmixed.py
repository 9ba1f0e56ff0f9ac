"""PMixED: mixing within a Rényi ball whose radius follows from a budget (Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import adapmixed_ext as ops
from adapmixed.limits import (
    MOST_EXPONENT,
    check_delta,
    check_epsilon,
    check_order,
    check_queries,
    check_question,
)
from adapmixed.mechanisms.mechanism import Mechanism, NextToken
from adapmixed.mechanisms.rows import Rows
from adapmixed.privacy import RenyiBound
from adapmixed.privacy.conversions import c_alpha, emptied_share
from adapmixed.privacy.costs import radius_for_epsilon, sound_bound
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class PMixED(Mechanism):
    """Mixing within a Rényi ball around the public distribution, with a fixed (ε, δ).

    Algorithm 2 of the paper, for a fixed number of queries, with a sound analysis. Under zero-out,
    one query costs D↔_α ≤ log(1 + (e^{(α−1)R} − 1)/N) / (α−1), and R is the largest radius that
    spends epsilon over all queries. No subset of the members is drawn. docs/theory/pmixed.md has
    the proof, and docs/theory/errata.md explains why the published rule is not valid.

    Attributes:
        epsilon: ε > c_α(δ) of the final (ε, δ) guarantee. For replace-one, half of it must be above
            c_α(δ/(1 + e^{ε/2})).
        delta: δ in [1e-15, 0.1].
        queries: T in [1, 2^40], number of queries that the budget is for. The first query charges
            all of them, so the decision to stop may depend on the answers.
        order: Rényi order α in (1, 1 024], fixed in advance.
        adjacency: neighbours of epsilon, "zero_out" or "replace_one", which is two zero-outs.

    Raises:
        ValueError: a setting is out of range, or the conversion to (ε, δ) costs at least epsilon.
    """

    name: ClassVar[str] = "pmixed"
    no_budget: ClassVar[str] = (
        "its charge is the same for every member, fixed for a number of queries; ClippedMixing and "
        "ClippedLogPool take one"
    )

    epsilon: float
    delta: float
    queries: int
    order: float
    adjacency: str = "zero_out"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        check_queries(self.queries)
        check_order(self.order)
        check_question(self.adjacency)
        epsilon, conversion = self._step(self.order)
        if not epsilon > conversion:
            of = "" if self.adjacency == "zero_out" else " of each of two zero-outs"
            raise ValueError(
                f"epsilon{of} must be > {conversion!r}, the cost of the conversion at "
                f"order {self.order!r} and delta {self.delta!r}, got {epsilon}: a larger order "
                "costs less"
            )

    @property
    def no_replacement(self) -> str:
        """The reason why an accountant of replace-one cannot be charged; "" if it can."""
        if self.adjacency == "replace_one":
            return ""
        return "its epsilon is for zero_out; take PMixED(..., adjacency='replace_one')"

    @property
    def per_query(self) -> float:
        """Rényi budget of one query at `order`, (ε − c_α(δ)) / T less the rounding of T sums.

        For replace-one, ε and δ are those of one of two zero-outs.
        """
        epsilon, conversion = self._step(self.order)
        rounding = 2.0**-50 * (abs(epsilon) + abs(conversion))
        slack = 1.0 - (self.queries + 8) * 2.0**-51
        return max(0.0, epsilon - conversion - rounding) / self.queries * slack

    def _step(self, order: float) -> tuple[float, float]:
        """Return ε of one zero-out and what of it the conversion at an order costs."""
        if self.adjacency == "zero_out":
            return self.epsilon, c_alpha(order, self.delta)
        epsilon = self.epsilon / 2
        share = emptied_share(epsilon, self.delta)
        return epsilon, c_alpha(order, share) if share > 0 else math.inf

    def radius(self, num_models: int) -> float:
        """Return the radius R of the ball for N models, in nats, at most 600/(α − 1)."""
        largest = radius_for_epsilon(self.order, self.per_query, num_models)
        return min(largest, MOST_EXPONENT / (self.order - 1))

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        """Prepare lines 2–8 of Algorithm 2, up to the draw of the token."""
        models, positions = rows.private.shape[:2]
        radius = self.radius(models)
        projection = ops.project(rows.private, rows.public, order=self.order, radius=radius)
        spent = sound_bound(self.order, radius, models)
        event = RenyiBound(self.order, spent, models, positions, budget=self.queries)
        return NextToken(rows, projection, (event,))
