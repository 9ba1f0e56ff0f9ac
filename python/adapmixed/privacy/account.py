"""The sums of all charges of an accountant, and the settings and binding that they fall under.

Events of a fixed cost are counted. Realised losses and individual charges enter arrays, rounded up
at each addition, so that the same events give the same bits on every machine. The module
`guarantee` computes the ε that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.errors import BudgetSpentError
from adapmixed.limits import (
    check_active,
    check_count,
    check_delta,
    check_epsilon,
    check_models,
    check_question,
)
from adapmixed.privacy.composition import adaptive_epsilon
from adapmixed.privacy.conversions import larger_order, rdp_to_dp, zcdp_to_dp
from adapmixed.privacy.encoding import CODECS, from_json, read_event, to_json
from adapmixed.privacy.events import (
    Caveat,
    Counted,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    Origin,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.rounding import array_add_up, times_up

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism


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
        total, queries = _summed(self.total, event.loss), self.queries + event.queries
        return replace(self, total=total, queries=queries)


@dataclass(frozen=True)
class Settings:
    """The settings of an accountant.

    Attributes:
        delta: δ in [1e-15, 0.1].
        epsilon: ε of every shard's own budget; None without budgets.
        adjacency: neighbours of the statement, "zero_out" or "replace_one".
    """

    delta: float
    epsilon: float | None
    adjacency: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", check_delta(self.delta))
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        check_question(self.adjacency)


@dataclass(frozen=True)
class Binding:
    """The mechanism and ensemble whose charges add up to one total.

    Attributes:
        mechanism: the mechanism's `repr`.
        num_models: N.
        measure: unit of the individual charges, "renyi" or "zcdp"; None without such charges.
        order: Rényi order of the individual charges; None without one.
        largest: largest individual charge of one answer, if answers have a bounded range.
        ensemble: the ensemble's fingerprint; None for logits made by hand.
        active_tokens: K of the active vocabulary; None if members speak about all tokens.
        unit: the column whose every name has a member of its own; None if shards are protected.
    """

    mechanism: str
    num_models: int
    measure: str | None
    order: float | None
    largest: float | None
    ensemble: str | None
    active_tokens: int | None
    unit: str | None = None


@dataclass(frozen=True)
class ShardBudget:
    """The largest sum of each member's own charges, fixed before the first query.

    The individual Rényi filter (Feldman and Zrnic 2021) turns it into (ε, δ); see
    docs/theory/per-shard-budgets.md.

    Attributes:
        measure: "renyi" if charges are D↔_order, "zcdp" if they are ρ.
        amount: B ≥ 0.
        order: Rényi order > 1 for "renyi", None for "zcdp".
        largest: for "zcdp", largest charge η²/8 of one answer, if all charges are of answers of a
            bounded range; ε is then smaller. None if that is not known.
    """

    measure: str
    amount: float
    order: float | None = None
    largest: float | None = None

    @classmethod
    @lru_cache(maxsize=256)
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        order: float | None,
        adjacency: str = "zero_out",
        largest: float | None = None,
    ) -> ShardBudget:
        """Return the largest budget whose ε for these neighbours is at most `epsilon`.

        It inverts the theorem of docs/theory/per-shard-budgets.md.

        Args:
            epsilon: ε > 0.
            delta: δ in (0, 1).
            order: Rényi order of the charges; None for zCDP.
            adjacency: "zero_out" or "replace_one".
            largest: as in :class:`ShardBudget`.

        Raises:
            ValueError: the conversion to (ε, δ) at this order and delta costs more than epsilon.
        """
        measure = "zcdp" if order is None else "renyi"

        def stated(amount: float) -> float:
            return cls(measure, amount, order, largest).epsilon(delta, adjacency)

        if order is not None and stated(0.0) > epsilon:

            def cost(other: float) -> float:
                return cls(measure, 0.0, other).epsilon(delta, adjacency)

            raise ValueError(
                f"epsilon must be > {stated(0.0)!r}, the cost of the conversion at order {order!r} "
                f"and delta {delta!r}, got {epsilon!r}{larger_order(order, cost, epsilon)}"
            )
        low, high = 0.0, 1.0
        while stated(high) <= epsilon:
            low, high = high, 2 * high
        for _ in range(200):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if stated(middle) <= epsilon else (low, middle)
        return cls(measure, low, order, largest)

    @lru_cache(maxsize=256)  # noqa: B019  (a budget is a few numbers, and the cache is small)
    def epsilon(self, delta: float, adjacency: str = "zero_out") -> float:
        """Return ε at δ for any number of tokens, rounded up.

        The theorem is in docs/theory/per-shard-budgets.md. For replace-one, the statement passes
        through the emptied shard. With "renyi", twice the Rényi budget is no bound there, so the
        result is 2 ε(δ₁) with δ₁ = δ/(1 + e^ε(δ₁)). With "zcdp", all charges become four times as
        large.

        Args:
            delta: δ in (0, 1).
            adjacency: "zero_out" or "replace_one".
        """
        order, amount = self.order, self.amount
        if order is None:
            factor = 4 if adjacency == "replace_one" else 1
            if self.largest is not None:
                largest = times_up(factor, self.largest)
                return adaptive_epsilon(times_up(factor, amount), largest, delta)
            return zcdp_to_dp(times_up(factor, amount), delta)
        return rdp_to_dp(order, amount, delta, adjacency)


@dataclass(frozen=True)
class Account:
    """The settings, the binding and the sums of all charges. :meth:`added` returns another account.

    Attributes:
        settings: settings of the accountant.
        binding: None before the first ticket is charged, and if only events were added.
        budget: budget of every shard; None until the binding or an individual charge fixes it.
        counts: number of answered queries by event of a fixed cost, whose own `queries` is 0.
        losses: sums of realised losses; None before the first.
        spent: (N,) float64, sums of individual charges; None before the first.
        charged: number of queries that were charged individually.
        caveats: names of `CAVEATS`.
    """

    settings: Settings
    binding: Binding | None = None
    budget: ShardBudget | None = None
    counts: Mapping[Counted, int] = field(default_factory=dict)
    losses: Losses | None = None
    spent: NDArray[np.float64] | None = field(default=None, compare=False)
    charged: int = 0
    caveats: frozenset[str] = frozenset()

    @property
    def empty(self) -> bool:
        """True if nothing was charged and no event was added."""
        return not (self.counts or self.caveats or self.losses) and self.spent is None

    def bound_to(self, mechanism: Mechanism, num_models: int, origin: Origin) -> Account:
        """Return the account bound to this mechanism and ensemble, or this one if it is already.

        Raises:
            ValueError: the account is bound to something else, or the mechanism gives no guarantee
                under the account's settings.
        """
        _check_fits(mechanism, self.settings)
        measure, order = mechanism.measure or (None, None)
        models = check_models(num_models)
        largest = mechanism.largest_charge(models)
        active = check_active(origin.active_tokens, "active_tokens")
        of = measure, order, largest, origin.ensemble, active, origin.unit
        return self.bound(Binding(_described(mechanism), models, *of))

    def bound(self, binding: Binding) -> Account:
        """Return the account with this binding, or this account if it has it already.

        Raises:
            ValueError: the account has another binding, or events were added to it.
        """
        if self.binding == binding:
            return self
        if self.binding is None and not self.empty:
            raise ValueError(
                "accountant must have charged nothing before it is bound to a mechanism, got one "
                "to which events were added: tickets need an accountant of their own"
            )
        if self.binding is not None:
            # A fingerprint is a digest of the private members, so no message shows it.
            told = replace(self.binding, ensemble=binding.ensemble, largest=binding.largest)
            was, now = _differences(told, binding)
            differ = f"{was!r}, got {now!r}" if was else "got another ensemble"
            raise ValueError(
                f"accountant must be charged for what it is bound to, {differ}: "
                "another mechanism or ensemble, also one with a member retrained or withdrawn, "
                "needs an accountant of its own (another --ledger), whose ε and δ add"
            )
        budget = self._budget(binding.measure, binding.order, binding.largest)
        return replace(self, binding=binding, budget=budget)

    def added(self, events: Iterable[Event]) -> Account:
        """Return the account with all of these events, in order.

        Raises:
            ValueError: an object is not an event, or its cost cannot be added to the others.
            BudgetSpentError: there are more queries than were planned.
        """
        found = self
        for event in events:
            found = found._added(event)
        return found

    def _added(self, event: Event) -> Account:
        if isinstance(event, Caveat):
            return replace(self, caveats=self.caveats | {event.name})
        if isinstance(event, IndividualCharge):
            return self._charged(event)
        if not isinstance(event, Counted | LeaveOneOutLoss):
            raise ValueError(f"events must be privacy events, got {type(event).__name__}")
        if self.settings.epsilon is not None and not isinstance(event, PublicAnswer):
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
            self._check_orders((event.order,), event.adjacency)
        self._check_plan(event, setting)
        counts[setting] = counts.get(setting, 0) + event.queries
        return replace(self, counts=counts)

    def _charged(self, event: IndividualCharge) -> Account:
        budget = self.budget or self._budget(event.measure, event.order)
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
        spent = _summed(spent, event.charge)
        if (spent > budget.amount).any():
            raise ValueError(
                f"charge must keep every shard within its budget {budget.amount!r}, got one that "
                "exceeds it"
            )
        charged = self.charged + event.queries
        return replace(self, budget=budget, spent=spent, charged=charged)

    def admit(self, charge: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which members may contribute, one position after another.

        A member contributes if its own charges so far and this one stay within its budget; see
        docs/theory/per-shard-budgets.md.

        Args:
            charge: (N, B) float64, upper bounds.

        Returns:
            (N, B) bool, True for members that contribute. Private.
        """
        assert self.budget is not None  # a binding to a mechanism with charges has fixed it
        active = np.zeros(charge.shape, dtype=np.bool_)
        spent = np.zeros(len(charge)) if self.spent is None else self.spent
        for position in range(charge.shape[1]):
            total = array_add_up(spent, charge[:, position])
            active[:, position] = total <= self.budget.amount
            spent = np.where(active[:, position], total, spent)
        return active

    def _check_family(self, event: Counted | LeaveOneOutLoss | IndividualCharge) -> None:
        method, known = event.method, self.method
        if None not in (method, known) and method != known:
            raise ValueError(
                f"events must come from one mechanism, got {type(event).__name__} after a total of "
                f"method {known!r}: no joint total is proved; keep an accountant for each, whose "
                "fixed ε and δ add"
            )
        models = getattr(event, "num_models", None)
        if None not in (models, self.num_models) and models != self.num_models:
            raise ValueError(
                f"num_models must be the same in every event, got {models} after {self.num_models}"
            )

    @property
    def method(self) -> str | None:
        """The method that composes all charges, of each event; None before the first cost."""
        if self.spent is not None:
            return IndividualCharge.method
        if self.losses is not None:
            return LeaveOneOutLoss.method
        return next(filter(None, (event.method for event in self.counts)), None)

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
            return (bound.order,), bound.adjacency
        return None

    def _check_plan(self, event: Counted, setting: Counted) -> None:
        budget = getattr(event, "budget", None)
        if budget is None:
            return
        for known in self.of(type(event)):
            if known.budget is not None and known != setting:
                was, now = _differences(known, setting)
                raise ValueError(
                    f"{' and '.join(was)} must be the same in every planned answer, got {now!r} "
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
        """Kind of guarantee that all charges have together, as `Guarantee.kind`."""
        if self.counts.get(UnprotectedAnswer(0), 0):
            return "none"
        if any(bound.published for bound in self.of(RenyiBound)):
            return "published"
        if self.losses is not None:
            return "data-dependent, ex-post"
        counts = self.counts.items()
        priced = any(n or getattr(e, "budget", None) for e, n in counts if e.method)
        return "fixed" if priced or self.spent is not None else "public"

    def _budget(
        self, measure: str | None, order: float | None, largest: float | None = None
    ) -> ShardBudget | None:
        epsilon, delta = self.settings.epsilon, self.settings.delta
        if epsilon is None or measure is None:
            return None
        adjacency = self.settings.adjacency
        return ShardBudget.for_epsilon(epsilon, delta, order, adjacency, largest)


def _summed(total: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (N, ...) sums with the (N, B, ...) values of B queries, one after another."""
    for position in range(values.shape[1]):
        total = array_add_up(total, values[:, position])
    return total


def _read_counts(written: list[Any]) -> dict[Any, int]:
    events: list[Any] = [read_event(one) for one in written]
    return {replace(event, queries=0): event.queries for event in events}


# How `to_json` writes the fields of an account.
for _kind in (Settings, Binding, ShardBudget, Losses):
    CODECS[_kind.__name__] = to_json, partial(from_json, _kind)
CODECS["frozenset[str]"] = sorted, frozenset
CODECS["Mapping[Counted, int]"] = (  # each event with its number of queries
    lambda counts: [to_json(replace(event, queries=n)) for event, n in counts.items()],
    _read_counts,
)


def _differences(known: Any, given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields in which two dataclasses of one class differ, as each has them."""
    names = [name for name in vars(known) if getattr(known, name) != getattr(given, name)]
    was, now = ({name: getattr(one, name) for name in names} for one in (known, given))
    return was, now


def _described(mechanism: Mechanism) -> str:
    """Return the mechanism with its settings; a real number looks alike whatever its type.

    A dataclass's own `repr` is "..." for good in a thread in which one was interrupted.
    """
    if not is_dataclass(mechanism):
        return repr(mechanism)
    settings = []
    for one in fields(mechanism):
        value = getattr(mechanism, one.name)
        real = "float" in str(one.type) and isinstance(value, Real)
        settings += [f"{one.name}={float(value) if real else value!r}"] if one.repr else []
    return f"{type(mechanism).__qualname__}({', '.join(settings)})"


def _check_fits(mechanism: Mechanism, settings: Settings) -> None:
    """Raise ValueError unless the mechanism gives a guarantee under these settings."""
    delta = getattr(mechanism, "delta", settings.delta)
    if delta != settings.delta:
        raise ValueError(
            f"delta must be the mechanism's own, {delta!r}, got an accountant of {settings.delta!r}"
        )
    if settings.adjacency == "replace_one" and mechanism.no_replacement:
        raise ValueError(
            f"adjacency must be 'zero_out' for {type(mechanism).__name__}, got 'replace_one': "
            f"{mechanism.no_replacement}"
        )
    if settings.epsilon is None:
        if mechanism.no_total:
            raise ValueError(mechanism.no_total)
        return
    if mechanism.no_budget:
        raise ValueError(
            f"epsilon must be None for {type(mechanism).__name__}, got {settings.epsilon!r}: "
            f"{mechanism.no_budget}"
        )
    if mechanism.planned_queries is not None:
        raise ValueError(
            f"queries must be None if every shard has a budget, got {mechanism.planned_queries}: "
            "any number of queries keeps it"
        )


def check_left(mechanism: Mechanism, answered: int, queries: int) -> None:
    """Raise BudgetSpentError unless the mechanism's plan has room for so many more queries."""
    planned, queries = mechanism.planned_queries, check_count("queries", queries, 0)
    if planned is not None and answered + queries > planned:
        raise BudgetSpentError(
            f"queries must stay within the {planned} that the mechanism was planned for, "
            f"{answered} of which are spent, got up to {queries} more with "
            f"{max(planned - answered, 0)} left: ask for fewer (evaluate: --queries, "
            "else --max-new-tokens)"
        )
