"""The paper's mechanisms, which mix within a Rényi ball: AdaPMixED (Algorithm 1), PMixED (2).

AdaPMixED screens with noise and has a data-dependent loss. PMixED's radius follows from a budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.limits import (
    MOST_EXPONENT,
    MOST_ORDERS,
    check_count,
    check_delta,
    check_epsilon,
    check_leakage,
    check_number,
    check_option,
    check_order,
    check_queries,
    check_question,
    check_sigma,
)
from adapmixed.mechanisms.mechanism import Mechanism, NextToken
from adapmixed.mechanisms.rows import ShapedLogits
from adapmixed.privacy import Event, GaussianScreening, LeaveOneOutLoss, PublicAnswer, RenyiBound
from adapmixed.privacy.conversions import c_alpha, emptied_share
from adapmixed.privacy.costs import radius_for_epsilon, sound_bound
from adapmixed_ext.inputs import Inputs, ensemble_logits
from adapmixed_ext.operators import screen_prepared
from adapmixed_ext.types import RandomSource

Screen = Literal["noisy", "public"]


@dataclass(frozen=True)
class AdaPMixED(Mechanism):
    """Mixing within a Rényi ball after a noisy screening, with a data-dependent, private ε.

    Algorithm 1 of the paper. A query that fails the screening is answered from q (lines 1–8).
    Otherwise every member's distribution becomes p̄_i = λ_i p_i + (1 − λ_i) q with the largest λ_i
    in [0, 1] such that D↔_α(p̄_i‖q) ≤ βα (lines 10–13). The token is drawn from p = (1/N) Σ_i p̄_i
    (lines 14 and 17), and the realised loss D↔_α(p‖p') of every member is charged (line 16). The
    paper's ablations are options. docs/theory/adapmixed.md states and proves the guarantee.

    Attributes:
        order: Rényi order α in (1, 1 024] of the ball, the screening and the loss.
        target_leakage: β ≥ 0 of the paper; the ball has radius R = βα in nats, (α − 1) R ≤ 600.
        screen: "noisy" as in the paper, "public" or None. "public" tests q in place of the mixture
            with the same noise, so it uses no private value and costs nothing.
        screen_weight: λ_s in [0, 1], weight of the private models in the screened mixture.
        sigma: standard deviation σ ≥ 1e-6 of the screening noise.
        threshold: T_s ≥ 0 in nats. A query whose divergence is above it is answered from q.
        screen_top_k: k ≥ 1, number of public top tokens that are screened.
        loss_orders: Rényi orders at which losses are recorded, public and fixed in advance. The
            accountant splits δ over them. An empty tuple means `order` alone, as in the paper.
        adjacency: "zero_out", or "add_remove" for the paper's leave-one-out, which divides by the
            number of the other members.

    Raises:
        ValueError: a setting is out of range, or the settings contradict each other.
    """

    name: ClassVar[str] = "adapmixed"
    no_budget: ClassVar[str] = (
        "its losses depend on the other members, and its screening tells a bit about all of them, "
        "which no member's charge covers; ClippedMixing and ClippedLogPool take one"
    )
    no_replacement: ClassVar[str] = "a realised loss is about the removal of a member"

    order: float
    target_leakage: float
    screen: Screen | None = "noisy"
    screen_weight: float = 1e-4
    sigma: float = 1e-2
    threshold: float = 4.5
    screen_top_k: int = 60
    loss_orders: tuple[float, ...] = ()
    adjacency: Literal["zero_out", "add_remove"] = "zero_out"

    def __post_init__(self) -> None:
        check_order(self.order)
        check_leakage(self.target_leakage, self.order)
        if self.screen not in ("noisy", "public", None):
            raise ValueError(
                f"screen must be one of ('noisy', 'public', None), got {self.screen!r}; noise is "
                "added before re-scaling: after it the stated sensitivity, √2 λ_s/N, would be too "
                "small by the mass of the screened tokens"
            )
        check_option("adjacency", self.adjacency, ("zero_out", "add_remove"))
        check_number("screen_weight", self.screen_weight, least=0.0, most=1.0)
        check_sigma(self.sigma)
        check_number("threshold", self.threshold, least=0.0, infinite=True)
        check_count("screen_top_k", self.screen_top_k)
        if not isinstance(self.loss_orders, tuple):
            raise ValueError(f"loss_orders must be a tuple of orders, got {self.loss_orders!r}")
        for order in self.loss_orders:
            check_order(order, "loss_orders")
        distinct = len(set(self.loss_orders)) == len(self.loss_orders)
        if not distinct or len(self.loss_orders) > MOST_ORDERS:
            raise ValueError(
                f"loss_orders must be at most {MOST_ORDERS} distinct orders, got "
                f"{self.loss_orders!r}"
            )

    @property
    def radius(self) -> float:
        """R = βα in nats."""
        return self.target_leakage * self.order

    @classmethod
    def preset(cls, name: str) -> AdaPMixED:
        """Return the paper's settings for a data set, from its table of privacy parameters.

        Args:
            name: "wikitext-103", "one-billion-word", "pubmed" or "air-dialogue".

        Raises:
            ValueError: there is no such data set.
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
        return PRESETS[name]

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        """Prepare Algorithm 1 up to the draw of the token (lines 8 and 17)."""
        # The projection comes first because the screening needs its log-sum-exps.
        projection = ops.project(rows.private, rows.public, order=self.order, radius=self.radius)
        models, positions = rows.private.shape[:2]
        events: list[Event] = []
        passed = torch.ones(positions, dtype=torch.bool, device=rows.public.device)
        if self.screen is not None:
            passed = self._passed(rows, projection, rng)
            if self.screen == "noisy":
                events.append(GaussianScreening(models, positions, self.screen_weight, self.sigma))
        if not bool(passed.all()):
            # Line 8: the query is answered from q, so every member has weight 0.
            weight = torch.where(passed, projection.weight, 0.0)
            projection = replace(projection, weight=weight)
        orders = self.loss_orders or (float(self.order),)
        losses = ops.leave_one_out(
            rows.private, rows.public, projection, orders=orders, adjacency=self.adjacency
        )
        # Recorded even if nothing passed: the orders are fixed in advance, not by the outcome.
        answered = losses[:, passed].cpu().numpy()
        events.append(LeaveOneOutLoss(orders, answered, self.adjacency))
        events.append(PublicAnswer(positions - answered.shape[1]))
        return NextToken(rows, projection, tuple(events), ~passed, losses=losses)

    def _passed(self, rows: ShapedLogits, projection: ops.Projection, rng: RandomSource) -> Tensor:
        """Run lines 1–8; return (B,) bool, True if the private models answer the query.

        The tail, behind the columns of tokens, is no token that could be screened.
        """
        positions, top_k = len(rows.public), min(self.screen_top_k, rows.width)
        private, public = rows.private[..., : rows.width], rows.public[:, : rows.width]
        sums = projection.private_lse, projection.public_lse
        inputs = Inputs(
            *ensemble_logits(private, public), *sums, projection.status, projection.public_status
        )
        # One draw per position, so that decisions do not depend on how calls group positions.
        noise = torch.empty(positions, top_k, dtype=torch.float64)
        for position in range(positions):
            noise[position] = ops.gaussian(top_k, sigma=self.sigma, rng=rng)
        result = screen_prepared(
            inputs,
            noise.to(public.device),
            weight=self.screen_weight if self.screen == "noisy" else 0.0,
            order=self.order,
            threshold=self.threshold,
            top_k=top_k,
        )
        return result.passed  # the projection of the same rows is checked for bad rows


# The paper's table of privacy parameters; N is 100 except 80 for one-billion-word. The defaults of
# the screening are those of wikitext-103.
PRESETS = {
    "wikitext-103": AdaPMixED(18.0, 0.2),
    "one-billion-word": AdaPMixED(18.0, 0.2),
    "pubmed": AdaPMixED(15.0, 0.3, screen_weight=1e-3, sigma=1e-1),
    "air-dialogue": AdaPMixED(15.0, 0.3),
}


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
            scope = "" if self.adjacency == "zero_out" else " of each of two zero-outs"
            raise ValueError(
                f"epsilon{scope} must be > {conversion!r}, the cost of the conversion at "
                f"order {self.order!r} and delta {self.delta!r}, got {epsilon}: a larger order "
                "costs less"
            )

    @property
    def no_replacement(self) -> str:  # type: ignore[override]
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

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        """Prepare lines 2–8 of Algorithm 2, up to the draw of the token."""
        models, positions = rows.private.shape[:2]
        radius = self.radius(models)
        projection = ops.project(rows.private, rows.public, order=self.order, radius=radius)
        spent = sound_bound(self.order, radius, models)
        event = RenyiBound(self.order, spent, models, positions, budget=self.queries)
        return NextToken(rows, projection, (event,))
