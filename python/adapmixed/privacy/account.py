"""The sums of all charges of an accountant, and the settings that they fall under.

Events are counted. The arrays of realised losses and individual charges are summed, rounded up at
each addition, so that the same events give the same bits on every machine. The module `guarantee`
computes the ε that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.errors import BudgetSpentError
from adapmixed.limits import check_delta, check_epsilon, check_question
from adapmixed.privacy.composition import adaptive_epsilon
from adapmixed.privacy.conversions import add_up, rdp_to_dp, times_up, zcdp_to_dp
from adapmixed.privacy.events import (
    READERS,
    Binding,
    Caveat,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    from_json,
    setting_of,
)


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
class ShardBudget:
    """The largest sum of each member's own charges, fixed before the first query.

    The individual Rényi filter (Feldman and Zrnic 2021) turns it into (ε, δ); see
    docs/theory/per-shard-budgets.md.

    Attributes:
        amount: B ≥ 0.
        order: Rényi order > 1 if charges are D↔_order, None if they are ρ.
        largest: largest charge ρ = η²/8 of one answer, if all charges are of answers of a bounded
            range; ε is then smaller. None if that is not known.
    """

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

        def stated(amount: float) -> float:
            return cls(amount, order, largest).epsilon(delta, adjacency)

        if order is not None and stated(0.0) > epsilon:
            raise ValueError(
                f"epsilon must be > {stated(0.0)!r}, the cost of the conversion at order {order!r} "
                f"and delta {delta!r}, got {epsilon!r}: a larger order costs less"
            )
        low, high = 0.0, 1.0
        while stated(high) <= epsilon:
            low, high = high, 2 * high
        while (middle := (low + high) / 2) not in (low, high):
            low, high = (middle, high) if stated(middle) <= epsilon else (low, middle)
        return cls(low, order, largest)

    def epsilon(self, delta: float, adjacency: str = "zero_out") -> float:
        """Return ε at δ for any number of tokens, rounded up.

        The theorem is in docs/theory/per-shard-budgets.md. For replace-one, the statement passes
        through the emptied shard. Twice the Rényi budget is no bound there, so the result is
        2 ε(δ₁) with δ₁ = δ/(1 + e^ε(δ₁)). Charges ρ become four times as large.

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
    """The settings, and the sums of all charges. :meth:`added` returns another account.

    Attributes:
        settings: settings of the accountant.
        counts: number of answered queries by event; the keys are of no query (`setting_of`).
        total: (N, K) sums of realised losses or (N,) of individual charges, float64, as upper
            bounds; None before the first.
    """

    settings: Settings
    counts: Mapping[Event, int] = field(default_factory=dict)
    total: NDArray[np.float64] | None = field(default=None, compare=False)

    @property
    def empty(self) -> bool:
        """True if nothing was charged and no event was added."""
        return all(isinstance(event, Binding) for event in self.counts)

    @property
    def binding(self) -> Binding | None:
        """None before the first ticket is charged, and if only events were added."""
        return next(iter(self.of(Binding)), None)

    @property
    def budget(self) -> ShardBudget | None:
        """Budget of every shard; None until the binding or an individual charge fixes it.

        Raises:
            ValueError: the conversion at their order costs more than ε.
        """
        found, asked = [*self.of(Binding), *self.of(IndividualCharge)], self.settings
        if not found or asked.epsilon is None:
            return None
        largest = getattr(found[0], "largest", None)
        of = asked.epsilon, asked.delta, found[0].order, asked.adjacency, largest
        return ShardBudget.for_epsilon(*of)

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
        if not isinstance(event, Event):
            raise ValueError(f"events must be privacy events, got {type(event).__name__}")
        self._check_joins(event)
        setting, queries = setting_of(event)
        self._check_plan(setting, queries)
        counts, total = {**self.counts, setting: self.counts.get(setting, 0) + queries}, self.total
        if isinstance(event, LeaveOneOutLoss | IndividualCharge):
            values = event.loss if isinstance(event, LeaveOneOutLoss) else event.charge
            total = np.zeros((len(values), *values.shape[2:])) if total is None else total
            for position in range(queries):
                total = add_up(total, values[:, position])
        found = replace(self, counts=counts, total=total)
        found._check_budget(event)
        return found

    def _check_budget(self, event: Event) -> None:
        """Raise ValueError unless every shard has a budget, and the last event kept within it."""
        budget = self.budget
        if not isinstance(event, IndividualCharge):
            return
        if budget is None or self.total is None:
            raise ValueError(
                "epsilon must be given to an accountant of IndividualCharges: without a budget of "
                "every shard they give no guarantee"
            )
        if event.order != budget.order:
            raise ValueError(
                f"order must be that of the budget, {budget.order!r}, got {event.order!r}"
            )
        if budget.largest is not None and (event.charge > budget.largest).any():
            raise ValueError(
                f"charge must be <= {budget.largest!r}, the largest of one answer, got one above it"
            )
        if (self.total > budget.amount).any():
            raise ValueError(
                f"charge must keep every shard within its budget {budget.amount!r}, got one that "
                "exceeds it"
            )

    def admit(self, charge: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return which members may contribute, one position after another.

        A member contributes if its own charges so far and this one stay within its budget; see
        docs/theory/per-shard-budgets.md.

        Args:
            charge: (N, B) float64, upper bounds.

        Returns:
            (N, B) bool, True for members that contribute. Private.
        """
        budget = self.budget
        assert budget is not None  # a binding to a mechanism with charges has fixed it
        active = np.zeros(charge.shape, dtype=np.bool_)
        spent = np.zeros(len(charge)) if self.total is None else self.total
        for position in range(charge.shape[1]):
            total = add_up(spent, charge[:, position])
            active[:, position] = total <= budget.amount
            spent = np.where(active[:, position], total, spent)
        return active

    def _check_joins(self, event: Event) -> None:
        """Raise unless the cost of an event can be added to the others."""
        if isinstance(event, Binding):
            return self._check_binds(event)
        name = type(event).__name__
        own = isinstance(event, IndividualCharge | PublicAnswer | Caveat)
        if self.settings.epsilon is not None and not own:
            raise ValueError(
                f"events must be IndividualCharge under a budget of every shard, got {name}: its "
                "cost is not one member's own"
            )
        if None not in (event.method, self.method) and event.method != self.method:
            raise ValueError(
                f"events must come from one mechanism, got {name} after a total of method "
                f"{self.method!r}: no joint total is proved; keep an accountant for each, whose "
                "fixed ε and δ add"
            )
        models = getattr(event, "num_models", None)
        before = next((one.num_models for one in self.counts if one.method), models)
        if models not in (None, before):
            raise ValueError(
                f"num_models must be the same in every event, got {models} after {before}"
            )
        if isinstance(event, LeaveOneOutLoss | RenyiBound):
            here = event.orders, event.adjacency
            if self.renyi not in (None, here):
                raise ValueError(
                    "orders and adjacency must be the same in every event, got "
                    f"{here!r} after {self.renyi!r}"
                )

    def _check_binds(self, binding: Binding) -> None:
        """Raise ValueError if the account has another binding, or events were added to it."""
        if not (self.binding or self.empty):
            raise ValueError(
                "accountant must have charged nothing before it is bound to a mechanism, got one "
                "to which events were added: tickets need an accountant of their own"
            )
        if self.binding not in (None, binding):
            # A fingerprint is a digest of the private members, so no message shows it.
            told = replace(self.binding, ensemble=binding.ensemble, largest=binding.largest)
            was, now = _differences(told, binding)
            differ = f"{was!r}, got {now!r}" if was else "got another ensemble"
            raise ValueError(
                f"accountant must be charged for what it is bound to, {differ}: "
                "another mechanism or ensemble, also one with a member retrained or withdrawn, "
                "needs an accountant of its own (another --ledger), whose ε and δ add"
            )

    @property
    def method(self) -> str | None:
        """The method that composes all charges, of each event; None before the first cost."""
        return next(filter(None, (event.method for event in self.counts)), None)

    @property
    def renyi(self) -> tuple[tuple[float, ...], str] | None:
        """Rényi orders and the neighbours of their costs; None without Rényi costs."""
        found = (e for e in self.counts if isinstance(e, LeaveOneOutLoss | RenyiBound))
        return next(((e.orders, e.adjacency) for e in found), None)

    def _check_plan(self, setting: Event, queries: int) -> None:
        budget = getattr(setting, "budget", None)
        if budget is None:
            return
        for known in self.of(type(setting)):
            if known.budget is not None and known != setting:
                was, now = _differences(known, setting)
                raise ValueError(
                    f"{' and '.join(was)} must be the same in every planned answer, got {now!r} "
                    f"after {was!r}: settings and number must be fixed beforehand; another plan "
                    "needs another accountant, whose ε and δ add"
                )
        answered = self.counts.get(setting, 0) + queries
        if answered > budget:
            raise BudgetSpentError(
                f"queries must stay within the {budget} that the guarantee was planned for, got "
                f"{answered}"
            )

    def of(self, kind: type) -> list[Any]:
        """Return the counted events of one class."""
        return [event for event in self.counts if isinstance(event, kind)]

    @property
    def charged(self) -> dict[Event, int]:
        """Number of charged queries by event: the first one of a plan charges the whole plan."""
        return {e: getattr(e, "budget", None) or n for e, n in self.counts.items()}

    @property
    def planned(self) -> int:
        """Number of answered queries that belong to a plan."""
        return sum(n for e, n in self.counts.items() if getattr(e, "budget", None) is not None)

    @property
    def queries(self) -> int:
        """Number of answered queries. A screening is part of an answer, not a query."""
        return sum(n for e, n in self.counts.items() if not isinstance(e, GaussianScreening))

    @property
    def kind(self) -> str:
        """Kind of guarantee that all charges have together, as `Guarantee.kind`."""
        if self.counts.get(UnprotectedAnswer(0), 0):
            return "none"
        if any(bound.published for bound in self.of(RenyiBound)):
            return "published"
        if self.of(LeaveOneOutLoss):
            return "data-dependent, ex-post"
        priced = any(n for e, n in self.charged.items() if e.method)
        return "fixed" if priced or self.total is not None else "public"


READERS["Settings"] = partial(from_json, Settings)


def _differences(known: Any, given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields in which two dataclasses of one class differ, as each has them."""
    names = [name for name in vars(known) if getattr(known, name) != getattr(given, name)]
    was, now = ({name: getattr(one, name) for name in names} for one in (known, given))
    return was, now
