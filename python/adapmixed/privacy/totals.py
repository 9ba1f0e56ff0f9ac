"""The sums of all charges so far.

Events of a fixed cost are counted. Realised losses and individual charges enter arrays, rounded up
at each addition, so that the same events give the same bits on every machine. The module `epsilon`
computes the ε that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.errors import BudgetSpentError
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.events import (
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.rounding import array_add_up

Counted = (
    GaussianScreening
    | RenyiBound
    | ClippedAnswer
    | BoundedRangeAnswer
    | PublicAnswer
    | UnprotectedAnswer
)
"""Events whose cost does not depend on private data."""

FAMILIES = {
    LeaveOneOutLoss: "realised losses or Rényi bounds",
    RenyiBound: "realised losses or Rényi bounds",
    GaussianScreening: "realised losses or Rényi bounds",
    ClippedAnswer: "ClippedAnswer",
    BoundedRangeAnswer: "BoundedRangeAnswer",
    IndividualCharge: "IndividualCharge",
}
"""Events by the family whose costs add up to one total."""


@dataclass(frozen=True)
class Losses:
    """Sums of realised losses, as upper bounds.

    Attributes:
        orders: K Rényi orders, fixed in advance.
        adjacency: neighbours that the losses are about.
        total: (N, K) float64, sums of the losses.
        queries: number of queries whose losses were added.
    """

    orders: tuple[float, ...]
    adjacency: str
    total: NDArray[np.float64] = field(compare=False)
    queries: int = 0

    def add(self, event: LeaveOneOutLoss) -> Losses:
        """Return the sums with one more event."""
        total = self.total
        for position in range(event.queries):
            total = array_add_up(total, event.loss[:, position])
        return replace(self, total=total, queries=self.queries + event.queries)


@dataclass(frozen=True)
class Totals:
    """All charges of one accountant. Immutable: :meth:`add` returns another object.

    Attributes:
        counts: number of answered queries by event of a fixed cost, whose own `queries` is 0.
        losses: sums of realised losses; None before the first.
        spent: (N,) float64, sums of individual charges; None before the first.
        charged: number of queries that were charged individually.
        caveats: names of `CAVEATS`.
    """

    counts: Mapping[Counted, int] = field(default_factory=dict)
    losses: Losses | None = None
    spent: NDArray[np.float64] | None = field(default=None, compare=False)
    charged: int = 0
    caveats: frozenset[str] = frozenset()

    def add(self, events: Iterable[Event], budget: ShardBudget | None) -> Totals:
        """Return the totals with these events.

        Args:
            events: events to add, in order.
            budget: budget of every shard; None without budgets.

        Raises:
            ValueError: an object is not an event, or its cost cannot be added to the others.
            BudgetSpentError: there are more queries than were planned.
        """
        found = self
        for event in events:
            found = found._added(event, budget)
        return found

    def _added(self, event: Event, budget: ShardBudget | None) -> Totals:
        if isinstance(event, Caveat):
            return replace(self, caveats=self.caveats | {event.name})
        if isinstance(event, IndividualCharge):
            return self._charged(event, budget)
        if not isinstance(event, Counted | LeaveOneOutLoss):
            raise ValueError(f"events must be privacy events, got {type(event).__name__}")
        if budget is not None and not isinstance(event, PublicAnswer):
            raise ValueError(
                "events must be IndividualCharge under a budget of every shard, got "
                f"{type(event).__name__}: its cost is not one member's own"
            )
        self._check_family(event)
        if isinstance(event, LeaveOneOutLoss):
            self._check_orders(event.orders, event.adjacency)
            empty = Losses(event.orders, event.adjacency, np.zeros(event.loss.shape[::2]))
            return replace(self, losses=(self.losses or empty).add(event))
        setting, counts = replace(event, queries=0), dict(self.counts)
        if isinstance(event, RenyiBound):
            self._check_orders((event.order,), "add_remove" if event.published else "zero_out")
        self._check_plan(event, setting)
        counts[setting] = counts.get(setting, 0) + event.queries
        return replace(self, counts=counts)

    def _charged(self, event: IndividualCharge, budget: ShardBudget | None) -> Totals:
        if budget is None:
            raise ValueError(
                "epsilon must be given to an accountant of IndividualCharges: without a budget of "
                "every shard they give no guarantee"
            )
        if (event.measure, event.order) != (budget.measure, budget.order):
            raise ValueError(
                f"measure and order must be those of the budget, "
                f"{(budget.measure, budget.order)!r}, got {(event.measure, event.order)!r}"
            )
        self._check_family(event)
        if budget.largest is not None and (event.charge > budget.largest).any():
            raise ValueError(
                f"charge must be <= {budget.largest!r}, the largest of one answer, got one above it"
            )
        spent = np.zeros(event.num_models) if self.spent is None else self.spent
        for position in range(event.queries):
            spent = array_add_up(spent, event.charge[:, position])
        if (spent > budget.amount).any():
            raise ValueError(
                f"charge must keep every shard within its budget {budget.amount!r}, got one that "
                "exceeds it"
            )
        return replace(self, spent=spent, charged=self.charged + event.queries)

    def admit(self, charge: NDArray[np.float64], budget: ShardBudget) -> NDArray[np.bool_]:
        """Return which members may contribute, one position after another.

        A member contributes if its own charges so far and this one stay within its budget; see
        docs/theory/per-shard-budgets.md.

        Args:
            charge: (N, B) float64, upper bounds.
            budget: budget of every shard.

        Returns:
            (N, B) bool, True for members that contribute. Private.
        """
        active = np.zeros(charge.shape, dtype=np.bool_)
        spent = np.zeros(len(charge)) if self.spent is None else self.spent
        for position in range(charge.shape[1]):
            total = array_add_up(spent, charge[:, position])
            active[:, position] = total <= budget.amount
            spent = np.where(active[:, position], total, spent)
        return active

    def _check_family(self, event: object) -> None:
        family, known = FAMILIES.get(type(event)), self._family
        if None not in (family, known) and family != known:
            raise ValueError(
                f"events must come from one mechanism, got {family} after {known}: no joint total "
                "is proved; keep an accountant for each, whose fixed ε and δ add"
            )
        models = getattr(event, "num_models", None)
        if None not in (models, self.num_models) and models != self.num_models:
            raise ValueError(
                f"num_models must be the same in every event, got {models} after {self.num_models}"
            )

    @property
    def _family(self) -> str | None:
        if self.spent is not None:
            return FAMILIES[IndividualCharge]
        if self.losses is not None:
            return FAMILIES[LeaveOneOutLoss]
        return next((FAMILIES[type(e)] for e in self.counts if type(e) in FAMILIES), None)

    @property
    def num_models(self) -> int | None:
        """N; None until an event names it."""
        if self.losses is not None:
            return len(self.losses.total)
        if self.spent is not None:
            return len(self.spent)
        return next((int(e.num_models) for e in self.counts if hasattr(e, "num_models")), None)

    def _check_orders(self, orders: tuple[float, ...], adjacency: str) -> None:
        known = self.renyi
        if known is not None and known != (orders, adjacency):
            raise ValueError(
                "orders and adjacency must be the same in every event, got "
                f"{(orders, adjacency)!r} after {known!r}"
            )

    @property
    def renyi(self) -> tuple[tuple[float, ...], str] | None:
        """Rényi orders and the neighbours of their costs; None without Rényi costs."""
        if self.losses is not None:
            return self.losses.orders, self.losses.adjacency
        for bound in self.of(RenyiBound):
            return (bound.order,), "add_remove" if bound.published else "zero_out"
        return None

    def _check_plan(self, event: Counted, setting: Counted) -> None:
        budget = getattr(event, "budget", None)
        if budget is None:
            return
        for known in self.of(type(event)):
            if known.budget is not None and known != setting:
                names = [
                    one.name
                    for one in fields(known)
                    if getattr(known, one.name) != getattr(setting, one.name)
                ]
                was, now = ({name: getattr(e, name) for name in names} for e in (known, setting))
                raise ValueError(
                    f"{' and '.join(names)} must be the same in every planned answer, got {now!r} "
                    f"after {was!r}: settings and number must be fixed beforehand; another plan "
                    "needs another accountant, whose ε and δ add"
                )
        answered = self.counts.get(setting, 0) + event.queries
        if answered > budget:
            raise BudgetSpentError(
                f"queries must stay within the {budget} that the guarantee was planned for, got "
                f"{answered}"
            )

    def of(self, kind: type) -> list[Any]:
        """Return the counted events of one class."""
        return [event for event in self.counts if isinstance(event, kind)]

    @property
    def planned(self) -> int:
        """Number of answered queries that belong to a plan."""
        return sum(n for e, n in self.counts.items() if getattr(e, "budget", None) is not None)

    @property
    def public_queries(self) -> int:
        """Number of queries that were answered from public values only."""
        return self.counts.get(PublicAnswer(0), 0)

    @property
    def queries(self) -> int:
        """Number of answered queries. A screening is part of an answer, not a query."""
        counted = sum(n for e, n in self.counts.items() if not isinstance(e, GaussianScreening))
        return counted + self.charged + (0 if self.losses is None else self.losses.queries)

    @property
    def kind(self) -> str:
        """Kind of guarantee that all charges have together, one of `guarantee.KINDS`."""
        if self.counts.get(UnprotectedAnswer(0), 0):
            return "none"
        if any(bound.published for bound in self.of(RenyiBound)):
            return "published"
        if self.losses is not None:
            return "data-dependent, ex-post"
        planned = any(getattr(event, "budget", None) is not None for event in self.counts)
        counted = any(n and type(event) in FAMILIES for event, n in self.counts.items())
        return "fixed" if self.spent is not None or planned or counted else "public"
