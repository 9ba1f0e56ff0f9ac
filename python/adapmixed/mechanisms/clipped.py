"""Mechanisms whose guarantee is fixed in advance, by clipping each member around q.

ClippedMixing is the mean of distributions clipped to a density-ratio box, ClippedLogPool the
logarithmic pool of clipped log-ratios.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

import adapmixed_ext as ops
from adapmixed.limits import (
    check_box,
    check_clip,
    check_number,
    check_optional_queries,
    check_order,
    check_scale,
)
from adapmixed.mechanisms.mechanism import Mechanism, NextToken
from adapmixed.mechanisms.rows import ShapedLogits
from adapmixed.privacy import BoundedRangeAnswer, ClippedAnswer, Event, PublicAnswer
from adapmixed.privacy.costs import charge_rounding, individual_rho
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class ClippedMixing(Mechanism):
    """A mean of distributions whose ratios to q are clipped, with a fixed, publishable (ε, δ).

    The token is drawn from p = (1/N) Σ_i p̄_i, where p̄_i = clip(s_i p_i, c q, C q) and s_i makes it
    sum to 1. The guarantee composes a dominating pair for a number of queries that is fixed in
    advance (`queries`), or it keeps a budget for every shard (`order`). Statements and proofs are
    in docs/theory/clipped-mixing.md and docs/theory/per-shard-budgets.md.

    Attributes:
        lower: c in [0, 1], the least ratio p̄_i/q, not its logarithm as in ClippedLogPool. With an
            order it is above 0.
        upper: C in [1, 1e6], the largest ratio p̄_i/q; C/c ≤ 1e6 unless c is 0.
        queries: T in [1, 2^40], number of queries that the fixed guarantee is for. None with
            per-shard budgets.
        order: Rényi order α in (1, 1 024] of the charges against per-shard budgets. None without
            budgets.
        public_confidence: probability in [0, 1]. If the likeliest public token has a larger one,
            the query is answered from q and costs nothing. None for no such rule.

    Raises:
        ValueError: a setting is out of range.
    """

    name: ClassVar[str] = "clipped-mixing"

    lower: float
    upper: float
    queries: int | None = None
    order: float | None = None
    public_confidence: float | None = None

    def __post_init__(self) -> None:
        lower, _ = check_box(self.lower, self.upper)
        check_optional_queries(self.queries)
        if self.order is not None:
            check_order(self.order)
            if lower == 0:
                raise ValueError(f"lower (a ratio) must be > 0 with an order, got {self.lower!r}")
        _check_confidence(self.public_confidence)

    @property
    def charge_order(self) -> float | None:
        """Rényi order of the individual charges; None without any."""
        return None if self.order is None else float(self.order)

    @property
    def no_budget(self) -> str:  # type: ignore[override]
        """The reason why per-shard budgets cannot be kept without an order; "" with one."""
        return "" if self.order is not None else "its charges need an order: ClippedMixing(order=8)"

    @property
    def no_total(self) -> str:  # type: ignore[override]
        """The reason why there is no guarantee without `queries` or budgets; "" with `queries`."""
        if self.queries is not None:
            return ""
        return (
            "queries must be given to ClippedMixing without per-shard budgets, got None: its "
            "guarantee is composed for a number of queries that is fixed in advance"
        )

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        models, positions = rows.private.shape[:2]
        clipping = ops.clip_project(
            rows.private, rows.public, lower=self.lower, upper=self.upper, orders=self.order
        ).check()
        unsure = rows.unsure(self.public_confidence, clipping.public_lse)
        charges, takes_part = None, unsure.expand(models, positions).contiguous()
        if clipping.charge is not None and self.order is not None:
            # Also for a row that is q itself, since the mean of the other rows is rounded, too.
            charge = clipping.charge[..., 0]
            relative, absolute = charge_rounding(float(self.order), models)
            charges = torch.where(unsure, charge * (1.0 + relative) + absolute, 0.0)
            # A row of charge 0 is an emptied shard's. It answers q as a missing member does, to
            # the last bit.
            takes_part = unsure & (charge > 0)
        answered = int(unsure.sum())
        events: tuple[Event, ...] = (PublicAnswer(positions - answered),)
        if self.queries is not None:
            setting = (self.lower, self.upper, models, answered, self.queries)
            events = (ClippedAnswer(*setting), *events)
        clipping = replace(clipping, active=takes_part)
        return NextToken(rows, clipping, events, ~unsure, charges)


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
        _check_confidence(self.public_confidence)

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
        setting = self.scale, self.lower, self.upper, num_models, queries, self.queries
        return (BoundedRangeAnswer(*setting),)

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        models, positions = rows.private.shape[:2]
        unsure = rows.unsure(self.public_confidence)
        answered = positions if self.public_confidence is None else int(unsure.sum())
        pool = ops.log_pool(
            rows.private, rows.public, lower=self.lower, upper=self.upper, scale=self.scale,
            active=None if answered == positions else unsure.expand(models, positions),
            lse_differences=rows.lse_differences,
        ).check()  # fmt: skip
        span = pool.span.cpu().numpy()
        rho = torch.from_numpy(individual_rho(span, self.scale, self.lower, self.upper, models))
        charges = rho if answered == positions else torch.where(unsure.cpu(), rho, 0.0)
        setting = (self.scale, self.lower, self.upper, models, answered, self.queries)
        events = BoundedRangeAnswer(*setting), PublicAnswer(positions - answered)
        return NextToken(rows, pool, events, ~unsure, charges)


def _check_confidence(public_confidence: float | None) -> None:
    """Raise ValueError unless this is a probability or None."""
    if public_confidence is not None:
        check_number("public_confidence", public_confidence, least=0.0, most=1.0)
