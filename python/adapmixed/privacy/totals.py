"""Everything that was charged so far, and the ε that follows.

Events of a fixed cost are counted. Realised losses and individual charges enter arrays, rounded up
at each addition, so that the same events give the same bits on every machine. An ε is computed when
it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.checks import check_question
from adapmixed.errors import BudgetSpentError
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.clipped_log_pool import bounded_range_rho
from adapmixed.privacy.composition import clipped_mixing_epsilon
from adapmixed.privacy.conversions import (
    c_alpha,
    rdp_to_dp,
    replace_one_epsilon,
    screening_rho,
    zcdp_to_dp,
)
from adapmixed.privacy.events import (
    CAVEATS,
    LOSS_ABSOLUTE_ERROR,
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
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.rounding import add_up, array_add_up, times_up

Counted = (
    GaussianScreening
    | RenyiBound
    | ClippedAnswer
    | BoundedRangeAnswer
    | PublicAnswer
    | UnprotectedAnswer
)
"""Events of a cost that does not depend on private data."""

_FAMILIES = {
    LeaveOneOutLoss: "realised losses or Rényi bounds",
    RenyiBound: "realised losses or Rényi bounds",
    GaussianScreening: "realised losses or Rényi bounds",
    ClippedAnswer: "ClippedAnswer",
    BoundedRangeAnswer: "BoundedRangeAnswer",
    IndividualCharge: "IndividualCharge",
}
"""Events whose costs add up in one total."""


@dataclass(frozen=True)
class Losses:
    """Upper bounds of realised losses in sum.

    Attributes:
        orders: K, fixed beforehand.
        adjacency: of the losses.
        total: (N, K) float64.
        queries: how many queries they are of.
    """

    orders: tuple[float, ...]
    adjacency: str
    total: NDArray[np.float64] = field(compare=False)
    queries: int = 0

    def add(self, event: LeaveOneOutLoss) -> Losses:
        """Return the sum with one event more."""
        total = self.total
        with np.errstate(over="ignore"):  # overflow to inf is the safe direction
            loss = event.loss * (1 + event.loss_error) + LOSS_ABSOLUTE_ERROR
            loss = np.nextafter(np.nextafter(loss, np.inf), np.inf)  # two roundings
        for position in range(event.queries):
            total = array_add_up(total, loss[:, position])
        return replace(self, total=total, queries=self.queries + event.queries)


@dataclass(frozen=True)
class Parts:
    """The parts of an ε; mixing + screening + conversion <= total (rounded up, >= 0).

    `order` is the Rényi order that gives it, None without one.
    """

    mixing: float
    screening: float
    conversion: float
    total: float
    order: float | None = None


@dataclass(frozen=True)
class Totals:
    """All charges of one accountant. Immutable: adding gives another one, or a ValueError.

    Attributes:
        counts: answered queries by event of a fixed cost, whose own `queries` is 0.
        losses: realised losses, None before the first.
        spent: (N,) float64, individual charges in sum, None before the first.
        charged: queries that were charged individually.
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
            budget: of every shard, None without one.

        Raises:
            ValueError: not an event, or one whose cost cannot be added to those before it.
            BudgetSpentError: more queries than were planned.
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
        spent = np.zeros(event.num_models) if self.spent is None else self.spent
        for position in range(event.queries):
            spent = array_add_up(spent, event.charge[:, position])
        if (spent > budget.amount).any():
            raise ValueError("charge must stay within the budget of every shard")
        return replace(self, spent=spent, charged=self.charged + event.queries)

    def admit(self, charge: NDArray[np.float64], budget: ShardBudget) -> NDArray[np.bool_]:
        """Return which members may contribute, position after position.

        A member contributes if its own charges so far and this one stay within the budget:
        docs/privacy.md, section 13.

        Args:
            charge: (N, B) float64, upper bounds.

        Returns:
            (N, B) bool: private.
        """
        active = np.zeros(charge.shape, dtype=np.bool_)
        spent = np.zeros(len(charge)) if self.spent is None else self.spent
        for position in range(charge.shape[1]):
            total = array_add_up(spent, charge[:, position])
            active[:, position] = total <= budget.amount
            spent = np.where(active[:, position], total, spent)
        return active

    def _check_family(self, event: object) -> None:
        family, known = _FAMILIES.get(type(event)), self._family
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
            return _FAMILIES[IndividualCharge]
        if self.losses is not None:
            return _FAMILIES[LeaveOneOutLoss]
        return next((_FAMILIES[type(e)] for e in self.counts if type(e) in _FAMILIES), None)

    @property
    def num_models(self) -> int | None:
        """N, None while no event has named it."""
        if self.losses is not None:
            return len(self.losses.total)
        if self.spent is not None:
            return len(self.spent)
        return next((int(e.num_models) for e in self.counts if hasattr(e, "num_models")), None)

    def _check_orders(self, orders: tuple[float, ...], adjacency: str) -> None:
        known = self._orders()
        if known is not None and known != (orders, adjacency):
            raise ValueError(
                "orders and adjacency must be the same in every event, got "
                f"{(orders, adjacency)!r} after {known!r}"
            )

    def _orders(self) -> tuple[tuple[float, ...], str] | None:
        if self.losses is not None:
            return self.losses.orders, self.losses.adjacency
        for bound in self._of(RenyiBound):
            return (bound.order,), "add_remove" if bound.published else "zero_out"
        return None

    def _check_plan(self, event: Counted, setting: Counted) -> None:
        budget = getattr(event, "budget", None)
        if budget is None:
            return
        for known in self._of(type(event)):
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

    def _of(self, kind: type) -> list[Any]:
        return [event for event in self.counts if isinstance(event, kind)]

    @property
    def planned(self) -> int:
        """Answered queries of a plan."""
        return sum(n for e, n in self.counts.items() if getattr(e, "budget", None) is not None)

    @property
    def public_queries(self) -> int:
        """Queries that were answered from public values only."""
        return self.counts.get(PublicAnswer(0), 0)

    @property
    def queries(self) -> int:
        """Answered queries; a screening belongs to an answer and is not counted."""
        counted = sum(n for e, n in self.counts.items() if not isinstance(e, GaussianScreening))
        return counted + self.charged + (0 if self.losses is None else self.losses.queries)

    @property
    def kind(self) -> str:
        """What everything so far can be promised as: one of `guarantee.KINDS`."""
        if self.counts.get(UnprotectedAnswer(0), 0):
            return "none"
        if any(bound.published for bound in self._of(RenyiBound)):
            return "published"
        if self.losses is not None:
            return "data-dependent, ex-post"
        planned = any(getattr(event, "budget", None) is not None for event in self.counts)
        counted = any(n and type(event) in _FAMILIES for event, n in self.counts.items())
        return "fixed" if self.spent is not None or planned or counted else "public"

    def guarantee(self, delta: float, adjacency: str, budget: ShardBudget | None) -> Guarantee:
        """Return the guarantee of all charges: docs/privacy.md, section 1, and `parts`.

        Args:
            delta: δ.
            adjacency: "zero_out" or "replace_one".
            budget: of every shard, None without one.

        Raises:
            ValueError: "replace_one" of a total that has no such statement.
        """
        check_question(adjacency)
        kind, queries, public = self.kind, self.queries, self.public_queries
        if kind == "none":
            return Guarantee(None, 1.0, kind, queries=queries, public_queries=public)
        if kind == "public":
            return Guarantee(0.0, 0.0, kind, queries=queries, public_queries=public)
        parts = self.parts(delta, adjacency, budget)
        orders, neighbours = self._orders() or ((), "zero_out")
        return Guarantee(
            parts.total,
            delta,
            kind,
            adjacency=neighbours if neighbours == "add_remove" else adjacency,
            method=self._method(),
            order=parts.order,
            orders=orders,
            queries=queries,
            public_queries=public,
            budget=self._covered(),
            caveats=tuple(name for name in CAVEATS if name in self.caveats),
        )

    def parts(self, delta: float, adjacency: str, budget: ShardBudget | None) -> Parts:
        """Return the parts of ε: docs/privacy.md, section 4 for realised losses at one order,
        5 for several, 2 for PMixED, 11 for ClippedMixing, 12 for ClippedLogPool, 13 for budgets.

        Arguments and errors as :meth:`guarantee`.
        """
        if self.kind in ("none", "public"):
            cost = math.inf if self.kind == "none" else 0.0
            return Parts(cost, 0.0, 0.0, cost)
        if self.spent is not None and budget is not None:
            total = budget.epsilon(delta, adjacency)
            return Parts(total, 0.0, 0.0, total, budget.order)
        boxes = self._of(ClippedAnswer)
        if boxes:
            box = boxes[0]
            total = clipped_mixing_epsilon(
                box.lower, box.upper, box.num_models, box.budget, delta, adjacency
            )
            return Parts(total, 0.0, 0.0, total)
        pools = self._of(BoundedRangeAnswer)
        if pools:
            rho = 0.0
            for pool in pools:
                setting = (pool.scale, pool.lower, pool.upper, pool.num_models, adjacency)
                rho = add_up(
                    rho, times_up(self._charged_queries(pool), bounded_range_rho(*setting))
                )
            return _zcdp(rho, 0.0, delta)
        return self._renyi(delta, adjacency)

    def _charged_queries(self, event: Counted) -> int:
        """How many queries are charged: all of a plan with its first."""
        budget: int | None = getattr(event, "budget", None)
        return self.counts[event] if budget is None else budget

    def _renyi(self, delta: float, adjacency: str) -> Parts:
        rho = 0.0
        for event, count in self.counts.items():
            if isinstance(event, GaussianScreening):
                cost = screening_rho(event.weight, event.sigma, event.num_models)
                rho = add_up(rho, times_up(count, cost))
        found = self._orders()
        if found is None:  # screenings alone
            return _zcdp(0.0, rho, delta)
        orders, _ = found
        mixing = np.zeros((1, len(orders))) if self.losses is None else self.losses.total
        for bound in self._of(RenyiBound):
            mixing = array_add_up(
                mixing, np.full((1, 1), times_up(self._charged_queries(bound), bound.epsilon))
            )
        screening = np.array([times_up(order, rho) for order in orders])
        spent = array_add_up(mixing, screening)
        if adjacency == "replace_one":
            return self._replaced(orders, float(mixing.max()), float(spent.max()), delta)
        conversion = _conversions(orders, delta)
        totals = array_add_up(spent, conversion)
        model = int(totals.min(axis=1).argmax())
        column = int(totals[model].argmin())
        return Parts(
            mixing=float(mixing[model, column]),
            screening=float(screening[column]),
            conversion=float(conversion[column]),
            total=max(0.0, float(totals[model, column])),
            order=orders[column],
        )

    def _replaced(
        self, orders: tuple[float, ...], mixing: float, spent: float, delta: float
    ) -> Parts:
        if self.kind != "fixed":
            raise ValueError(
                "adjacency must be 'zero_out' for a total that is not fixed, got 'replace_one': a "
                "realised loss is about the removal of a member"
            )
        (order,) = orders
        total = replace_one_epsilon(order, spent, delta)
        once = max(0.0, rdp_to_dp(order, spent, delta) - spent)
        return Parts(mixing, spent - mixing, min(once, max(0.0, total - spent)), total, order)

    def _method(self) -> str:
        if self.spent is not None:
            return "per-shard budget"
        if self._of(ClippedAnswer):
            return "pld"
        return "zcdp" if self._of(BoundedRangeAnswer) or self._orders() is None else "renyi"

    def _covered(self) -> int | None:
        """The number of a plan, None beside costs that are not planned."""
        priced = [event for event in self.counts if type(event) in _FAMILIES]
        plans = {getattr(event, "budget", None) for event in priced}
        return plans.pop() if len(plans) == 1 and self.losses is None else None


def _zcdp(mixing: float, screening: float, delta: float) -> Parts:
    """Return ε of two zCDP costs at the best order, which is public since they are.

    docs/privacy.md, section 5, last paragraph, and section 7.
    """
    total, order = zcdp_to_dp(add_up(mixing, screening), delta)
    if math.isinf(order):
        return Parts(0.0, 0.0, 0.0, total)
    parts = times_up(order, mixing), times_up(order, screening), c_alpha(order, delta)
    return Parts(*parts, max(total, math.fsum(parts)), order)


def _conversions(orders: tuple[float, ...], delta: float) -> NDArray[np.float64]:
    """Return (K,) c_α(δ/K); shares of δ are rounded down, so that they sum to at most δ.

    docs/privacy.md, section 5.
    """
    share = delta if len(orders) == 1 else math.nextafter(delta / len(orders), 0.0)
    return np.array([c_alpha(order, share) for order in orders])
