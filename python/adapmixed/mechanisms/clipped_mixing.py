"""ClippedMixing: the mean of distributions clipped to a density-ratio box around q."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

import adapmixed_ext as ops
from adapmixed.limits import check_box, check_optional_queries, check_order
from adapmixed.mechanisms.mechanism import Mechanism, NextToken
from adapmixed.mechanisms.rows import Rows, check_confidence
from adapmixed.privacy import ClippedAnswer, Event, PublicAnswer
from adapmixed.privacy.costs import charge_rounding
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
        check_confidence(self.public_confidence)

    @property
    def measure(self) -> tuple[str, float | None] | None:
        """Unit of the individual charges: ("renyi", order); None without an order."""
        return None if self.order is None else ("renyi", float(self.order))

    @property
    def no_budget(self) -> str:  # type: ignore[override]
        """The reason why per-shard budgets cannot be kept without an order; "" with one."""
        return "" if self.order is not None else "its charges need an order: ClippedMixing(order=8)"

    @property
    def no_total(self) -> str:
        """The reason why there is no guarantee without `queries` or budgets; "" with `queries`."""
        if self.queries is not None:
            return ""
        return (
            "queries must be given to ClippedMixing without per-shard budgets, got None: its "
            "guarantee is composed for a number of queries that is fixed in advance"
        )

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        models, positions = rows.private.shape[:2]
        clipping = ops.clip_project(
            rows.private, rows.public, lower=self.lower, upper=self.upper, orders=self.order
        ).check()
        asked = rows.unsure(self.public_confidence, clipping.public_lse)
        charges, takes_part = None, asked.expand(models, positions).contiguous()
        if clipping.charge is not None and self.order is not None:
            # Also for a row that is q itself, since the mean of the other rows is rounded, too.
            charge = clipping.charge[..., 0]
            relative, absolute = charge_rounding(float(self.order), models)
            charges = torch.where(asked, charge * (1.0 + relative) + absolute, 0.0)
            # A row of charge 0 is an emptied shard's. It answers q as a missing member does, to
            # the last bit.
            takes_part = asked & (charge > 0)
        answered = int(asked.sum())
        events: tuple[Event, ...] = (PublicAnswer(positions - answered),)
        if self.queries is not None:
            setting = (self.lower, self.upper, models, answered, self.queries)
            events = (ClippedAnswer(*setting), *events)
        clipping = replace(clipping, active=takes_part)
        return NextToken(rows, clipping, events, ~asked, charges)
