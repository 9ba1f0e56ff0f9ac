"""The paper's own analysis, to reproduce its numbers: no guarantee (docs/theory/errata.md)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np
import torch

import adapmixed_ext as ops
from adapmixed.limits import check_count, check_number
from adapmixed.mechanisms import AdaPMixED, Mechanism, NextToken, PMixED, Rows
from adapmixed.mechanisms.mechanism import public_token
from adapmixed.privacy import LeaveOneOutLoss, RenyiBound
from adapmixed_ext.types import RandomSource
from adapmixed_lab.baselines.given import GivenToken, unprotected
from adapmixed_lab.reproduce.published_bound import published_target_leakage


@dataclass(frozen=True)
class PublishedPMixED(PMixED):
    """PMixED by the paper's rule: β from |S_t|, amplification by equation 4, integer order.

    Its bound is not valid: the true loss can exceed it without limit. The first instance warns. The
    members that take part are drawn (Algorithm 2, lines 2-8), and the mean is over them alone.

    Attributes are as in PMixED; `order` must be an integer if `sample_rate` < 1.

    Attributes:
        sample_rate: s in (0, 1], probability that a member takes part in a query.
    """

    name: ClassVar[str] = "pmixed-published"

    sample_rate: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("sample_rate", self.sample_rate, above=0.0, most=1.0)
        if self.sample_rate < 1.0 and self.order != int(self.order):
            raise ValueError(
                f"order must be an integer with sample_rate < 1, got {self.order}: the published "
                "formula is for integer orders"
            )
        _warn()

    def radius(self, num_models: int) -> float:
        """Return R = βα for a subset of this size."""
        beta = published_target_leakage(self.order, self.per_query, num_models, self.sample_rate)
        return beta * self.order

    def answer_bytes(self, rows: int, vocab_size: int, element: int) -> int:
        """Return the bytes of `Mechanism.answer_bytes` and those of three more float64 rows."""
        return super().answer_bytes(rows, vocab_size, element) + 3 * 8 * vocab_size

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        models, positions = rows.private.shape[:2]
        event = RenyiBound(
            self.order, self.per_query, models, positions, published=True, budget=self.queries
        )
        if self.sample_rate == 1.0 or not positions:
            return NextToken(rows, self._projection(rows, models), (event,))
        # One draw for each position, so that subsets do not depend on the grouping into calls.
        draws = [ops.gaussian(models, sigma=1.0, rng=rng) for _ in range(positions)]
        taken = (torch.special.ndtr(torch.stack(draws, 1)) < self.sample_rate).to(
            rows.public.device
        )
        sizes, q = taken.sum(0), public_token(rows).probabilities()
        given = q.clone()
        for size in filter(None, sizes.unique().tolist()):
            # The mean over all with weight 0 for the others is |S|/N of the subset's, the rest q.
            projection = self._projection(rows, size)
            projection = replace(projection, weight=projection.weight.where(taken, 0.0))
            mixed = ops.mixture(rows.private, rows.public, projection)
            of_subset = (models * mixed - (models - size) * q) / size
            given[sizes == size] = of_subset.clamp(min=0.0)[sizes == size]
        return GivenToken(rows, unprotected(rows)[1], (event,), given=given)

    def _projection(self, rows: Rows, size: int) -> ops.Projection:
        """Return the projection of all members onto the ball for a subset of this size."""
        return ops.project(rows.private, rows.public, order=self.order, radius=self.radius(size))


@dataclass(frozen=True)
class PaperRule(Mechanism):
    """AdaPMixED charged by the paper's rule, Σ_t max_i of the losses, at one order.

    The first members of an ensemble give many sizes from one forward pass. Shards keep their size,
    so a smaller ensemble has seen less text. The paper distributes all text over fewer and larger
    shards instead.

    Attributes:
        adapmixed: answers the queries; it has one order.
        count: number of members that answer, the first ones, and the N of the costs; None: all.
    """

    name: ClassVar[str] = "adapmixed"
    no_budget: ClassVar[str] = AdaPMixED.no_budget

    adapmixed: AdaPMixED
    count: int | None = None

    def __post_init__(self) -> None:
        if self.count is not None:
            check_count("count", self.count)
        if len(self.adapmixed.loss_orders) > 1:
            raise ValueError(
                f"loss_orders must be one order, got {self.adapmixed.loss_orders!r}, because "
                "the paper's rule has no more"
            )

    @property
    def no_replacement(self) -> str:
        """The reason of AdaPMixED."""
        return self.adapmixed.no_replacement

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        if self.count is not None:
            if len(rows.private) < self.count:
                raise ValueError(
                    f"count must be at most the ensemble's {len(rows.private)} models, got "
                    f"{self.count}"
                )
            rows = replace(rows, private=rows.private[: self.count])
        prepared = self.adapmixed._prepare(rows, rng)
        events = tuple(
            replace(event, loss=np.broadcast_to(event.loss.max(0), event.loss.shape).copy())
            if isinstance(event, LeaveOneOutLoss)
            else event
            for event in prepared.events
        )
        return replace(prepared, events=events)


@cache
def _warn() -> None:
    warnings.warn(
        "PublishedPMixED reproduces the paper's data-independent bound, which is not valid: the "
        'true loss can exceed it without limit (see "Errata of the published analysis"). Its '
        "numbers are for comparison only.",
        UserWarning,
        stacklevel=4,
    )
