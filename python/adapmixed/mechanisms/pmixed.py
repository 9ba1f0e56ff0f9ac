"""PMixED: a radius from a budget for a fixed number of queries (Algorithm 2)."""

import warnings
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms.base import Mechanism, Proposal, proposal
from adapmixed.mechanisms.checks import check_count, check_number, check_option
from adapmixed.mechanisms.law import Law, SplitLaw, public_law
from adapmixed.privacy.ball_bounds import radius_for_epsilon, sound_bound
from adapmixed.privacy.conversions import c_alpha
from adapmixed.privacy.events import RenyiBound
from adapmixed.privacy.published_bound import published_target_leakage
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import Projection, RandomSource
from adapmixed_ext.ops import ensemble_logits

_warned = False


def _warn_published() -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            "PMixED(analysis='published') reproduces the paper's data-independent bound, which is "
            "not valid: the true loss can exceed it without limit (docs/privacy.md). Its numbers "
            "are for comparison only.",
            UserWarning,
            stacklevel=4,
        )


@dataclass(frozen=True)
class PMixED(Mechanism):
    """A fixed (ε, δ) for a fixed number of queries.

    analysis="sound" (default): zero-out adjacency; per query
    D↔_α ≤ log(1 + (s/N)(e^{(α−1)R} − 1)) / (α−1), and R is the largest radius that spends epsilon
    over all queries. Subsampling at rate s leaves the other slots at q, so the law of a token is
    the full mixture with weights s λ_i: that law is used itself, and no subset is ever drawn.
    docs/privacy.md has the proof.

    analysis="published": the paper's rule (β from |S_t|, amplification by equation 12, integer
    order): for comparison only, since its bound is not valid; warns once.

    Attributes:
        epsilon: ε > c_α(δ) of the final (ε, δ) guarantee.
        delta: δ in (0, 1).
        queries: T ≥ 1, how many queries the budget is for. All of it is charged with the first of
            them, so that stopping early may depend on the answers; the accountant refuses more.
        order: Rényi order α > 1, fixed beforehand.
        sample_rate: s in (0, 1], probability that a model takes part in a query.
        analysis: "sound" or "published".
    """

    name: ClassVar[str] = "pmixed"

    epsilon: float
    delta: float
    queries: int
    order: float
    sample_rate: float = 1.0
    analysis: Literal["sound", "published"] = "sound"

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon, above=0.0)
        check_number("delta", self.delta, above=0.0)
        if not self.delta < 1.0:
            raise ValueError(f"delta must be < 1, got {self.delta}")
        check_count("queries", self.queries)
        check_number("order", self.order, above=1.0)
        check_number("sample_rate", self.sample_rate, above=0.0, most=1.0)
        check_option("analysis", self.analysis, ("sound", "published"))
        if (
            self.analysis == "published"
            and self.sample_rate < 1.0
            and self.order != int(self.order)
        ):
            raise ValueError(
                f"order must be an integer with analysis='published' and sample_rate < 1, got "
                f"{self.order}: the published formula is for integer orders"
            )
        if self.analysis == "published":
            _warn_published()
        conversion = c_alpha(self.order, self.delta)
        if not self.epsilon > conversion:
            raise ValueError(
                f"epsilon must be > {conversion!r}, what the conversion to (epsilon, delta) "
                f"takes at order {self.order!r} and delta {self.delta!r}, got {self.epsilon}"
            )

    @property
    def budget(self) -> int:
        """T, the queries that epsilon is for."""
        return self.queries

    @property
    def per_query(self) -> float:
        """Rényi budget of one query at `order`: (ε − c_α(δ)) / T, less the rounding of T sums."""
        conversion = c_alpha(self.order, self.delta)
        rounding = 2.0**-50 * (abs(self.epsilon) + abs(conversion))
        slack = 1.0 - (self.queries + 8) * 2.0**-51
        return max(0.0, self.epsilon - conversion - rounding) / self.queries * slack

    def radius(self, num_models: int) -> float:
        """R for N models (for the published rule: for a subset of that size)."""
        if self.analysis == "sound":
            return radius_for_epsilon(self.order, self.per_query, num_models, self.sample_rate)
        beta = published_target_leakage(self.order, self.per_query, num_models, self.sample_rate)
        return beta * self.order

    def held_bytes(self, rows: int, vocab_size: int, element: int) -> int:
        """As `Mechanism.held_bytes`; of the published rule also the rows of the subset drawn."""
        subset = self.analysis == "published" and self.sample_rate < 1.0
        copied = rows * vocab_size * element if subset else 0
        return copied + super().held_bytes(rows, vocab_size, element)

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`; Algorithm 2, lines 2–8, without the draw of the token."""
        private, public = ensemble_logits(private_logits, public_logits)
        models, positions = ranks.slots(len(private)), len(public)
        if self.analysis == "published":
            spent, published, adjacency = self.per_query, True, "add_remove"
            law: Law | SplitLaw = self._published(private, public, rng, ranks)
        else:
            radius = self.radius(models)
            spent = sound_bound(self.order, radius, models, self.sample_rate)
            published, adjacency = False, "zero_out"
            projection = ops.project(private, public, order=self.order, radius=radius)
            if self.sample_rate < 1.0:
                projection = _thinned(projection, self.sample_rate)
            slots = None if ranks.alone else models
            law = Law(private, public, projection, ranks=ranks, slots=slots)
        event = RenyiBound(
            self.order, spent, models, positions, adjacency, published, budget=self.queries
        )
        from_public = torch.zeros(positions, dtype=torch.bool, device=public.device)
        return proposal(law, public, models, from_public, [event], targets, rng, ranks=ranks)

    def _published(
        self, private: Tensor, public: Tensor, rng: RandomSource, ranks: Ranks
    ) -> Law | SplitLaw:
        """Lines 2–8: a Poisson subset S_t per position, β from its size, the mean over S_t."""
        models, positions = ranks.slots(len(private)), len(public)
        if self.sample_rate == 1.0:
            radius = self.radius(models)
            projection = ops.project(private, public, order=self.order, radius=radius)
            slots = None if ranks.alone else models
            return Law(private, public, projection, ranks=ranks, slots=slots)

        def drawn() -> Tensor:
            # One draw a position: subsets do not depend on how positions are grouped into calls.
            draws = torch.empty(models, positions, dtype=torch.float64)
            for b in range(positions):
                draws[:, b] = ops.gaussian(models, sigma=1.0, rng=rng)
            taken: Tensor = torch.special.ndtr(draws) < self.sample_rate
            return taken

        chosen = ranks.decide(drawn, (models, positions), torch.bool, torch.device("cpu"))
        mine, laws = ranks.rows(chosen), []
        for b in range(positions):
            size, here = int(chosen[:, b].sum()), slice(b, b + 1)
            rows = mine[:, b].nonzero()[:, 0].to(private.device)
            if not size:
                laws.append(public_law(public[here], ranks))
                continue
            subset, slots = private[rows, here], None if ranks.alone else size
            if not len(rows):  # none of this rank's: it adds nothing
                nothing = public_law(public[here]).projection
                laws.append(Law(subset, public[here], nothing, ranks=ranks, slots=slots))
                continue
            radius = self.radius(size)
            projection = ops.project(subset, public[here], order=self.order, radius=radius)
            laws.append(Law(subset, public[here], projection, ranks=ranks, slots=slots))
        return SplitLaw(tuple(laws))


def _thinned(projection: Projection, rate: float) -> Projection:
    """λ → s λ: the law of a slot that answers q with probability 1 − s."""
    return replace(
        projection,
        weight=rate * projection.weight,
        complement=(1.0 - rate) + rate * projection.complement,
    )
