"""The accountant, which turns all charges of an ensemble into one guarantee.

Events are counted. The arrays of realised losses and individual charges are summed, rounded up at
each addition, so that the same events give the same bits on every machine. The module `guarantee`
computes the ε that follows.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
    check_queries,
    check_question,
)
from adapmixed.privacy.composition import ShardBudget
from adapmixed.privacy.conversions import add_up
from adapmixed.privacy.events import (
    BY_HAND,
    READERS,
    Binding,
    Caveat,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    Origin,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    from_json,
    setting_of,
    to_json,
)
from adapmixed.privacy.guarantee import Guarantee, guarantee_of, parts_of
from adapmixed.privacy.ledger import Ledger, enter

if TYPE_CHECKING:
    from adapmixed.mechanisms import Allowance, Mechanism, Ticket


@dataclass(frozen=True)
class Account:
    """The settings, and the sums of all charges. :meth:`added` returns another account.

    Attributes:
        delta: δ in [1e-15, 0.1].
        epsilon: ε of every shard's own budget; None without budgets.
        adjacency: neighbours of the statement, "zero_out" or "replace_one".
        counts: number of answered queries by event; the keys are of no query (`setting_of`).
        total: (N, K) sums of realised losses or (N,) of individual charges, float64, as upper
            bounds; None before the first.
    """

    delta: float
    epsilon: float | None
    adjacency: str
    counts: Mapping[Event, int] = field(default_factory=dict)
    total: NDArray[np.float64] | None = field(default=None, compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The first three attributes, by their names."""
        return {name: getattr(self, name) for name in ("delta", "epsilon", "adjacency")}

    def of(self, kind: type) -> list[Any]:
        """Return the counted events of one class."""
        return [event for event in self.counts if isinstance(event, kind)]

    @property
    def empty(self) -> bool:
        """True if nothing was charged and no event was added."""
        return len(self.counts) == len(self.of(Binding))

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
        events = [*self.of(Binding), *self.of(IndividualCharge)]
        if not events or self.epsilon is None:
            return None
        largest = getattr(events[0], "largest", None)
        arguments = self.epsilon, self.delta, events[0].order, self.adjacency, largest
        return ShardBudget.for_epsilon(*arguments)

    @property
    def method(self) -> str | None:
        """The method that composes all charges, of each event; None before the first cost."""
        return next(filter(None, (event.method for event in self.counts)), None)

    @property
    def renyi(self) -> tuple[tuple[float, ...], str] | None:
        """Rényi orders and the neighbours of their costs; None without Rényi costs."""
        costs = self.of(LeaveOneOutLoss) + self.of(RenyiBound)
        return (costs[0].orders, costs[0].adjacency) if costs else None

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

    def added(self, events: Iterable[Event]) -> Account:
        """Return the account with all of these events, in order.

        Raises:
            ValueError: an object is not an event, or its cost cannot be added to the others.
            BudgetSpentError: there are more queries than were planned.
        """
        account = self
        for event in events:
            account = account._added(event)
        return account

    def _added(self, event: Event) -> Account:
        if not isinstance(event, Event):
            raise ValueError(f"events must be privacy events, got {type(event).__name__}")
        if isinstance(event, Binding):
            self._check_binds(event)
        else:
            self._check_joins(event)
        setting, queries = setting_of(event)
        self._check_plan(setting, queries)
        counts, total = {**self.counts, setting: self.counts.get(setting, 0) + queries}, self.total
        if isinstance(event, LeaveOneOutLoss | IndividualCharge):
            values = event.loss if isinstance(event, LeaveOneOutLoss) else event.charge
            total = np.zeros((len(values), *values.shape[2:])) if total is None else total
            for position in range(queries):
                total = add_up(total, values[:, position])
        account = replace(self, counts=counts, total=total)
        budget = account.budget  # raises if no budget keeps ε
        if isinstance(event, IndividualCharge):
            account._check_spent(event, budget)
        return account

    def _check_binds(self, binding: Binding) -> None:
        """Raise ValueError if the account has another binding, or events were added to it."""
        if not (self.binding or self.empty):
            raise ValueError(
                "accountant must have charged nothing before it is bound to a mechanism, got one "
                "to which events were added: tickets need an accountant of their own"
            )
        if self.binding not in (None, binding):
            # A fingerprint is a digest of the private members, so no message shows it.
            differ = {n for n, v in vars(binding).items() if v != getattr(self.binding, n)}
            shown = sorted(differ - {"ensemble", "largest"})
            bound, offered = ({n: getattr(b, n) for n in shown} for b in (self.binding, binding))
            raise ValueError(
                f"accountant must be charged for what it is bound to, {bound}, got "
                f"{offered or 'another ensemble'}: another mechanism or ensemble, also one with a "
                "member retrained or withdrawn, needs an accountant of its own (another --ledger), "
                "whose ε and δ add"
            )

    def _check_joins(self, event: Event) -> None:
        """Raise ValueError unless the cost of an event can be added to the others."""
        individual = isinstance(event, IndividualCharge | PublicAnswer | Caveat)
        if self.epsilon is not None and not individual:
            raise ValueError(
                "events must be IndividualCharge under a budget of every shard, got "
                f"{type(event).__name__}: its cost is not one member's own"
            )
        for other in (setting for setting in self.counts if setting.method):
            for name in ("method", "num_models", "orders", "adjacency"):
                old, new = getattr(other, name, None), getattr(event, name, None)
                if None not in (old, new) and old != new:
                    raise ValueError(
                        f"{name} must be the same in every event, got {new!r} after {old!r}: no "
                        "joint total is proved; keep an accountant for each, whose fixed ε and δ "
                        "add"
                    )

    def _check_plan(self, setting: Event, queries: int) -> None:
        """Raise unless a planned event is of the one plan, which has so many queries left."""
        budget = getattr(setting, "budget", None)
        if budget is None:
            return
        for other in self.of(type(setting)):
            if other.budget is not None and other != setting:
                raise ValueError(
                    f"events must be of one plan, got {setting} after {other}: settings and number "
                    "must be fixed beforehand; another plan needs another accountant, whose ε and "
                    "δ add"
                )
        answered = self.counts.get(setting, 0) + queries
        if answered > budget:
            raise BudgetSpentError(
                f"queries must stay within the {budget} that the guarantee was planned for, got "
                f"{answered}"
            )

    def _check_spent(self, event: IndividualCharge, budget: ShardBudget | None) -> None:
        """Raise ValueError unless every shard has a budget, and the last event kept within it."""
        if budget is None or self.total is None:
            raise ValueError(
                "epsilon must be given to an accountant of IndividualCharges: without a budget of "
                "every shard they give no guarantee"
            )
        largest = math.inf if budget.largest is None else budget.largest
        above = (event.charge > largest).any() or (self.total > budget.amount).any()
        if above or event.order != budget.order:
            raise ValueError(
                f"charge must keep every shard within its budget, {budget}, got one of order "
                f"{event.order} that exceeds it"
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


READERS["Account"] = partial(from_json, Account)


class Accountant:
    """The charges of one mechanism on one ensemble, composed into a `Guarantee`.

    The first charge binds the accountant to its mechanism, ensemble and N. A charge of any other
    raises ValueError. Threads and generators may share an accountant. A forked child cannot use its
    parent's: each of the two would spend the same budget.

    Args:
        delta: δ of the statement, in [1e-15, 0.1].
        epsilon: ε > 0 of a budget for every shard, or None for no budgets. Once a shard has spent
            its budget, its member answers the public distribution without any notice. Any number
            of queries then keeps (epsilon, delta). Needs a mechanism with individual charges:
            ClippedLogPool, or ClippedMixing with an order.
        path: ledger file on a local file system, or None to keep everything in memory. Every
            charge is durable before its answer is drawn. An existing ledger is continued.
        adjacency: neighbours of the statement, "zero_out" or "replace_one".
        create: if False, raise LedgerWriteError if there is no ledger at `path`.

    Raises:
        ValueError: an argument is not valid.
        LedgerError: the ledger at `path` cannot be used; see `adapmixed.errors`.
    """

    def __init__(
        self,
        delta: float,
        *,
        epsilon: float | None = None,
        path: str | os.PathLike[str] | None = None,
        adjacency: str = "zero_out",
        create: bool = True,
    ) -> None:
        self._lock, self._process = threading.Lock(), os.getpid()
        budget = None if epsilon is None else check_epsilon(epsilon)
        self._kept = Account(check_delta(delta), budget, check_question(adjacency))
        self._ledger: Ledger | None = None
        self._ensembles: dict[str, object] = {}
        if path is not None:
            self._ledger = Ledger(path, self._kept, create=create)

    @property
    def _account(self) -> Account:
        return self._kept if self._ledger is None else self._ledger.reading.account

    @property
    def delta(self) -> float:
        """δ of the statement."""
        return self._account.delta

    @property
    def epsilon(self) -> float | None:
        """ε of every shard's own budget; None without budgets."""
        return self._account.epsilon

    @property
    def adjacency(self) -> str:
        """The neighbours of the statement, "zero_out" or "replace_one"."""
        return self._account.adjacency

    @property
    def queries(self) -> int:
        """Number of answered queries so far. A screening is part of an answer, not a query."""
        return self._account.queries

    @property
    def planned(self) -> int:
        """Number of answered queries that count towards a plan: public answers do not."""
        return self._account.planned

    @property
    def charges(self) -> int:
        """Number of records in the ledger file; 0 without a ledger."""
        return 0 if self._ledger is None else self._ledger.reading.charges

    @property
    def spent(self) -> NDArray[np.float64]:
        """(N,) float64, the part of `limit` that each shard has spent. Private: for the operator.

        Raises:
            ValueError: as :attr:`limit`.
        """
        account, _ = self._account, self.limit  # which raises without a budget
        if account.total is not None:
            return account.total.copy()
        return np.zeros(account.of(Binding)[0].num_models)

    @property
    def limit(self) -> float:
        """The budget of every shard, in the unit of the mechanism's individual charges. Public.

        Raises:
            ValueError: the accountant has no `epsilon`, or the mechanism is not known yet.
        """
        if (budget := self._account.budget) is None:
            raise ValueError(
                "spent and limit need an accountant with epsilon=, bound to a mechanism by a first "
                "charge"
            )
        return budget.amount

    def bind(self, mechanism: Mechanism, num_models: int, origin: Origin = BY_HAND) -> None:
        """Bind the accountant to one mechanism and one ensemble.

        The first charge does the same. To bind again to the same pair has no effect.

        Args:
            mechanism: how queries are answered, with its settings.
            num_models: N.
            origin: the ensemble that the rows come from.

        Raises:
            ValueError: the accountant is bound to something else, the mechanism's charges cannot
                be kept within per-shard budgets, or they give no guarantee without budgets.
            LedgerError: the binding could not be written.
        """
        self._check_usable()
        with self._lock:
            self._bind(self._bound(mechanism, num_models, origin))

    def register(self, ensemble: str | os.PathLike[str]) -> None:
        """Have the next charge enter the ledger into the register of an ensemble's ledgers.

        Args:
            ensemble: the ensemble's folder. The register lies in the private folder next to it.
        """
        self._ensembles.setdefault(os.path.realpath(ensemble), None)

    def _bound(self, mechanism: Mechanism, num_models: int, origin: Origin) -> Account:
        """Return the account bound to this mechanism and ensemble, the same if it was already.

        Raises:
            ValueError: as :meth:`bind`.
        """
        account, binding = self._account, _binding(mechanism, num_models, origin)
        if account.binding == binding:
            return account
        _check_fits(mechanism, account)
        return account.added([binding])

    def _bind(self, account: Account) -> None:
        if account is not self._account:
            self._commit(account.of(Binding), account)

    def check_left(self, mechanism: Mechanism, queries: int, spent: int | None = None) -> None:
        """Check that the mechanism's plan has room for so many more queries.

        Args:
            mechanism: the mechanism that will answer.
            queries: the largest number of queries that may be answered. An answer that ends early
                takes fewer.
            spent: number of answered queries of the plan; None for those that were charged.

        Raises:
            BudgetSpentError: fewer queries are left of the plan.
        """
        planned, queries = mechanism.planned_queries, check_count("queries", queries, 0)
        spent = self.planned if spent is None else spent
        if planned is not None and spent + queries > planned:
            raise BudgetSpentError(
                f"queries must stay within the {planned} that the mechanism was planned for, "
                f"{spent} of which are spent, got up to {queries} more with "
                f"{max(planned - spent, 0)} left: ask for fewer (evaluate: --queries, "
                "else --max-new-tokens)"
            )

    def check_seeded(self, seeded: bool) -> None:
        """Raise ValueError if charges go to a ledger and the randomness may be seeded."""
        if seeded and self._ledger is not None:
            raise ValueError(
                "rng must be SecureRandom() if charges go to a ledger, got a seeded source: "
                "whoever knows a seed can undo the randomness"
            )

    def charge(self, ticket: Ticket) -> None:
        """Charge a ticket, so that it can be released.

        With a ledger, the charge is durable when this returns. With `epsilon`, the members
        contribute whose shards can pay. If the charge fails, the ticket can never be released.

        Args:
            ticket: the answer to pay for, from `Mechanism.propose`.

        Raises:
            ValueError: the ticket was charged before, the accountant is bound to something else,
                or the accountant has a ledger and the randomness is seeded. Nothing was charged.
            BudgetSpentError: the plan is spent. Nothing was charged.
            LedgerError: the charge could not be made durable. The ledger may hold it when it is
                opened again. This accountant can charge no more.
        """
        self._check_usable()
        with self._lock:
            ticket.charge(partial(self._pay, ticket))

    def charge_ahead(self, allowance: Allowance, queries: int) -> None:
        """Charge queries whose rows do not exist yet, which the allowance then lets be released.

        A charge that fails may or may not be in the ledger, so it pays for nothing.

        Args:
            allowance: what is charged, and the count of it.
            queries: number of queries, ≥ 1.

        Raises:
            ValueError: every shard has a budget, or as :meth:`charge`.
            BudgetSpentError: the plan is spent. Nothing was charged.
            LedgerError: as :meth:`charge`.
        """
        self._check_usable()
        events = allowance.mechanism.cost_ahead(allowance.num_models, check_queries(queries))
        with self._lock:
            self._pay(allowance, [*events, *allowance.caveats], None)
        allowance.add(queries)

    def _pay(
        self,
        answers: Ticket | Allowance,
        events: Sequence[Event],
        charges: NDArray[np.float64] | None,
    ) -> NDArray[np.bool_] | None:
        """Charge events or, under budgets, the members that can pay; return who was charged."""
        bound, active = self._bound(answers.mechanism, answers.num_models, answers.origin), None
        if charges is not None and bound.epsilon is not None:
            active = bound.admit(charges)
            cost = IndividualCharge(answers.mechanism.charge_order, np.where(active, charges, 0.0))
            events = [cost, *(event for event in events if isinstance(event, Caveat))]
        charged = self._added(bound, events)
        self._bind(bound)
        self._commit(events, charged)
        return active

    def add(self, events: Event | Iterable[Event]) -> Accountant:
        """Add events of answers that this process did not give.

        For accounting without a mechanism. An accountant takes either events or tickets, which
        :meth:`charge` takes. Either all events are added or, after an error, none.

        Args:
            events: one event or several.

        Returns:
            This accountant.

        Raises:
            ValueError: a ticket was charged here, or the costs have no common total.
            LedgerError: as :meth:`charge`.
        """
        self._check_usable()
        with self._lock:
            if self._account.binding is not None:
                raise ValueError(
                    "accountant must not be bound to a mechanism to take events: its tickets are "
                    "charged by charge(ticket)"
                )
            listed = tuple(events) if isinstance(events, Iterable) else (events,)
            self._commit(listed, self._added(self._account, listed))
        return self

    def _added(self, account: Account, events: Sequence[Event]) -> Account:
        """Return the account with these events, or raise before anything is written."""
        self.check_seeded(Caveat("seeded") in events)
        return account.added(events)

    def _commit(self, events: Sequence[Event], account: Account) -> None:
        if self._ledger is None:
            self._kept = account
            return
        facts = account.kind, *account.counts  # decide what the register has
        for ensemble, registered in [*self._ensembles.items()]:
            if not account.empty and registered != facts:
                enter(ensemble, replace(self._ledger.reading, account=account))
                self._ensembles[ensemble] = facts
        self._ledger.append(events, account)

    def guarantee(self, adjacency: str | None = None) -> Guarantee:
        """Return the guarantee of all charges so far.

        docs/concepts/guarantees.md explains each kind of guarantee, and docs/theory proves it.

        Args:
            adjacency: "zero_out" or "replace_one"; None for that of the accountant.

        Returns:
            The guarantee. It is private if its kind is "data-dependent, ex-post".

        Raises:
            ValueError: "replace_one" was asked for realised losses, which have no such statement.
        """
        return guarantee_of(self._account, adjacency=adjacency)

    def get_epsilon(self, delta: float) -> float:
        """Return ε at this δ of all charges so far, rounded up.

        Only totals that do not depend on private data have such a number; see
        docs/concepts/guarantees.md.

        Args:
            delta: δ in [1e-15, 0.1].

        Raises:
            ValueError: delta is out of range, the total depends on private data, it rests on the
                published bound, or there is no guarantee. `guarantee()` says which.
        """
        guarantee = guarantee_of(self._account, check_delta(delta))
        if guarantee.kind not in ("fixed", "public") or guarantee.epsilon is None:
            raise ValueError(
                f"epsilon must be that of a fixed total, got one of kind {guarantee.kind!r}: "
                "guarantee() says what can be stated"
            )
        return guarantee.epsilon

    def breakdown(self) -> dict[str, float]:
        """Return the parts of ε, as in Table 2b of the paper.

        The theorems behind each part are in docs/theory/pmixed.md, docs/theory/adapmixed.md,
        docs/theory/clipped-mixing.md, docs/theory/clipped-log-pool.md and
        docs/theory/per-shard-budgets.md.

        Returns:
            Floats named "mixing", "screening", "conversion" and "total". "total" equals
            `guarantee().epsilon`. After an unprotected answer, "mixing" and "total" are inf.
        """
        parts = parts_of(self._account, self.delta, self.adjacency)._asdict()
        del parts["order"]
        return parts

    def state(self) -> dict[str, Any]:
        """Return settings and totals as JSON values, exact to the bit. They are private."""
        return dict(to_json(self._account))

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Accountant:
        """Return an accountant that continues from a state, without a ledger.

        For an evaluation that is resumed. Two accountants made from one state both spend what was
        left, so the caller must make only one. Totals are taken as they are: a state that was
        edited states what was edited.

        Args:
            state: the value of :meth:`state`.

        Raises:
            ValueError: the state is not valid.
        """
        account = from_json(Account, dict(state))
        accountant = cls(**account.settings)
        accountant._kept = account
        return accountant

    def close(self, *, empty: bool = True) -> None:
        """Close the ledger file, so that another writer can open it. To close twice is allowed.

        Unless `empty` is true, a ledger without charges is removed.
        """
        if self._ledger is not None and os.getpid() == self._process:
            with self._lock:
                self._ledger.close(empty=empty)

    def __enter__(self) -> Accountant:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                "an accountant must be used in the process that made it: parent and child of a "
                "fork would each spend its budget"
            )


@lru_cache(maxsize=64, typed=True)
def _binding(mechanism: Any, num_models: int, origin: Origin) -> Binding:
    """Return what charges are bound to; a real number looks alike whatever its type."""
    settings = {f.name: (str(f.type), getattr(mechanism, f.name)) for f in fields(mechanism)}
    reals = {n: float(v) for n, (t, v) in settings.items() if "float" in t and isinstance(v, Real)}
    return Binding(
        repr(replace(mechanism, **reals)),
        check_models(num_models),
        mechanism.charge_order,
        mechanism.largest_charge(num_models),
        origin.ensemble,
        check_active(origin.active_tokens, "active_tokens"),
        origin.unit,
    )


def _check_fits(mechanism: Mechanism, settings: Account) -> None:
    """Raise ValueError unless the mechanism gives a guarantee under an account's settings."""
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
