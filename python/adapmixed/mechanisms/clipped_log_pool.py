"""ClippedLogPool: the logarithmic pool of clipped log-ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

import adapmixed_ext as ops
from adapmixed.limits import check_clip, check_optional_queries, check_scale
from adapmixed.mechanisms.mechanism import Mechanism, NextToken
from adapmixed.mechanisms.rows import Rows, check_confidence
from adapmixed.privacy import BoundedRangeAnswer, Event, PublicAnswer
from adapmixed.privacy.costs import individual_rho
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class ClippedLogPool(Mechanism):
    """A logarithmic pool of clipped log-ratios, with a fixed (ε, δ) that may be published.

    The token is drawn from p(v) ∝ q(v) exp((κ/N) Σ_i clip(log p_i(v)/q(v), a, b)). If one shard is
    emptied, or its member removed, log p changes within a range of κ(b−a)/N, from which the ε of
    all answers follows. N is a public constant. docs/theory/clipped-log-pool.md and
    docs/theory/bounded-range.md state and prove the guarantee.

    Attributes:
        lower: a ≤ 0, the least log p_i/q, a logarithm and not a ratio as in ClippedMixing.
        upper: b ≥ 0, the largest log p_i/q; b − a ≤ 64.
        scale: κ ≥ 0, κ (b − a) ≤ 330. A scale above 1 sharpens the log-ratios on which the shards
            agree.
        queries: T in [1, 2^40], number of queries that the guarantee is planned for. The first
            query charges all of them. None charges every query as it comes. Their number must then
            be fixed in advance, unless every shard has a budget.
        public_confidence: probability in [0, 1]. If the likeliest public token has a larger one,
            the query is answered from q and costs nothing. None for no such rule.

    Raises:
        ValueError: a setting is out of range.
    """

    name: ClassVar[str] = "clipped-log-pool"

    lower: float
    upper: float
    scale: float = 1.0
    queries: int | None = None
    public_confidence: float | None = None

    def __post_init__(self) -> None:
        check_scale(self.scale, *check_clip(self.lower, self.upper))
        check_optional_queries(self.queries)
        check_confidence(self.public_confidence)

    @property
    def measure(self) -> tuple[str, float | None] | None:
        """Unit of the individual charges: ("zcdp", None)."""
        return "zcdp", None

    def largest_charge(self, num_models: int) -> float | None:
        """Return the charge of a member whose log-ratios reach both clips, rounded up.

        Args:
            num_models: N.
        """
        span = np.array((self.upper - self.lower) * (1 + 1e-12))
        return float(individual_rho(span, self.scale, self.lower, self.upper, num_models))

    def cost_ahead(self, num_models: int, queries: int) -> tuple[Event, ...]:
        """Return the cost of queries whose rows do not exist yet.

        Args:
            num_models: N.
            queries: number of queries.

        Raises:
            ValueError: there is a `public_confidence`.
        """
        if self.public_confidence is not None:
            raise ValueError(
                "public_confidence must be None to be charged in advance, got "
                f"{self.public_confidence!r}: public answers cost nothing, and which ones they "
                "are is not known yet"
            )
        of = self.scale, self.lower, self.upper, num_models, queries, self.queries
        return (BoundedRangeAnswer(*of),)

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        models, positions = rows.private.shape[:2]
        asked = rows.unsure(self.public_confidence)
        answered = positions if self.public_confidence is None else int(asked.sum())
        pool = ops.log_pool(
            rows.private, rows.public, lower=self.lower, upper=self.upper, scale=self.scale,
            active=None if answered == positions else asked.expand(models, positions),
            lse_differences=rows.lse_differences,
        ).check()  # fmt: skip
        span = pool.span.cpu().numpy()
        rho = torch.from_numpy(individual_rho(span, self.scale, self.lower, self.upper, models))
        charges = rho if answered == positions else torch.where(asked.cpu(), rho, 0.0)
        setting = (self.scale, self.lower, self.upper, models, answered, self.queries)
        events = BoundedRangeAnswer(*setting), PublicAnswer(positions - answered)
        return NextToken(rows, pool, events, ~asked, charges)
