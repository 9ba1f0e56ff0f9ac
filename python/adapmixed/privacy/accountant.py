"""The accountant: every charge of an ensemble in, a guarantee out."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.account import Account, Settings
from adapmixed.privacy.encoding import write_fields
from adapmixed.privacy.events import Caveat, Event
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.ledger.writer import LedgerFile
from adapmixed.privacy.protocols import Charged, Proposed, bound_to, check_left


class Accountant:
    """Composes the charges of one mechanism on one ensemble into a `Guarantee`.

    An accountant is bound to the first mechanism, ensemble and N that it is charged for; another
    one raises. Threads and generators may share it. It cannot be copied or pickled, and a forked
    child cannot use it: two holders would each spend the same budget.

    Args:
        delta: δ in (0, 1) of the statement.
        epsilon: if given, stops every shard at its own budget: a member whose shard has spent it
            answers the public distribution from then on, silently, and any number of queries keeps
            (epsilon, delta). Needs a mechanism with individual charges: ClippedLogPool, or
            ClippedMixing with an order.
        path: of a ledger file on a local file system. Every charge is durable before its answer is
            drawn, and an existing file goes on. None keeps everything in memory.
        adjacency: which neighbours are asked about: "zero_out" or "replace_one".
        create: False raises if there is no ledger at `path`.

    Raises:
        ValueError: bad arguments.
        LedgerError: the ledger at `path` cannot be used: see `adapmixed.errors`.
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
        self._account = Account(Settings(delta, epsilon, adjacency))
        self._file: LedgerFile | None = None
        if path is not None:
            self._file, self._account = LedgerFile.open(path, self._account, create=create)
        _accountants.add(self)

    @property
    def delta(self) -> float:
        """δ of the statement."""
        return self._account.settings.delta

    @property
    def epsilon(self) -> float | None:
        """ε of every shard's own budget; None without one."""
        return self._account.settings.epsilon

    @property
    def adjacency(self) -> str:
        """The neighbours that are asked about."""
        return self._account.settings.adjacency

    @property
    def queries(self) -> int:
        """Answered queries so far (a screening belongs to an answer and is not counted)."""
        return self._account.totals.queries

    @property
    def durable(self) -> bool:
        """Whether charges go to a ledger file."""
        return self._file is not None

    @property
    def charges(self) -> int:
        """Records in the ledger file; 0 without one."""
        return 0 if self._file is None else self._file.count

    @property
    def spent(self) -> NDArray[np.float64]:
        """(N,) float64, what each shard has spent of `limit`: private, for the operator.

        Raises:
            ValueError: without `epsilon`, or before N is known.
        """
        return self._account.spent()

    @property
    def limit(self) -> float:
        """What each shard may spend, in the measure of the mechanism's charges: public.

        Raises:
            ValueError: without `epsilon`, or before a mechanism is known.
        """
        return self._account.limit()

    def bind(self, mechanism: Charged, num_models: int, ensemble: str | None = None) -> None:
        """Bind the accountant to a mechanism and an ensemble; it can be charged for no others.

        The first charge does the same. Binding twice to the same does nothing.

        Args:
            mechanism: how queries are answered.
            num_models: N.
            ensemble: fingerprint of the ensemble; None if it is not known.

        Raises:
            ValueError: it is bound to something else, or the mechanism's charges cannot be kept
                within a budget of every shard, or give no guarantee without one.
            LedgerError: the binding could not be written.
        """
        with self._lock:
            self._check_usable()
            self._bind(bound_to(self._account, mechanism, num_models, ensemble))

    def _bind(self, account: Account) -> None:
        if account is not self._account and account.binding is not None:
            self._commit({"binding": write_fields(account.binding)}, account)

    def check_left(self, mechanism: Charged, queries: int) -> None:
        """Raise BudgetSpentError if fewer queries are left of the mechanism's plan.

        Args:
            queries: the most that may be answered: an answer that ends early takes fewer.
        """
        check_left(mechanism, self._account.totals.planned, queries)

    def charge(self, proposal: Proposed) -> None:
        """Charge a proposal, which can then be released. With a path, durable when this returns.

        With `epsilon`, decides which members contribute: those whose shard can pay. If the charge
        fails, the proposal can never be released.

        Raises:
            ValueError: the proposal was charged before, the accountant is bound to something else,
                or a seeded source stands beside a ledger; nothing was charged.
            BudgetSpentError: the plan is spent; nothing was charged.
            LedgerError: the charge could not be made durable. It may be found when the ledger is
                opened again; this object can charge no more.
        """
        with self._lock:
            begun = proposal._begin()
            try:
                self._check_usable()
                of = (proposal.mechanism, proposal.num_models, proposal.ensemble)
                bound = bound_to(self._account, *of)
                active = None
                if bound.budget is not None:
                    active = bound.totals.admit(begun.individual_charges(), bound.budget)
                events = begun.events(active)
                charged = self._added(bound, events)
                self._bind(bound)
                self._commit({"events": events}, charged)
            except BaseException:
                begun.fail()
                raise
            begun.settle(active)

    def add(self, events: Event | Iterable[Event]) -> Accountant:
        """Add one event or several, of answers that this process did not give. Returns self.

        For accounting alone: proposals are charged by :meth:`charge`, and an accountant takes
        either proposals or events. All are added or, on an error, none.

        Raises:
            ValueError: proposals were charged here, or the costs have no common total.
            LedgerError: as :meth:`charge`.
        """
        with self._lock:
            self._check_usable()
            if self._account.binding is not None:
                raise ValueError(
                    "accountant must not be bound to a mechanism to take events: its proposals are "
                    "charged by charge(proposal)"
                )
            listed = tuple(events) if isinstance(events, Iterable) else (events,)
            self._commit({"events": listed}, self._added(self._account, listed))
        return self

    def _added(self, account: Account, events: Sequence[Event]) -> Account:
        """Return the account with these events; what cannot be charged raises, nothing written."""
        if self._file is not None and Caveat("seeded") in events:
            raise ValueError(
                "rng must be SecureRandom() if charges go to a ledger, got a seeded source: "
                "whoever knows a seed can undo the randomness"
            )
        return account.added(events)

    def _commit(self, entry: Mapping[str, Any], account: Account) -> None:
        if self._file is not None:
            self._file.append(entry, self._account, account)
        self._account = account

    def guarantee(self, adjacency: str | None = None) -> Guarantee:
        """Return the guarantee of everything charged so far.

        What each kind means and where it is proved: docs/privacy.md, section 1.

        Args:
            adjacency: "zero_out" or "replace_one"; None: as the accountant was made.

        Raises:
            ValueError: "replace_one" of realised losses, which have no such statement.
        """
        return self._account.guarantee(self.delta, adjacency or self.adjacency)

    def get_epsilon(self, delta: float) -> float:
        """Return ε at this δ of everything charged so far, rounded up: docs/privacy.md, section 1.

        Raises:
            ValueError: the total is not fixed: it depends on private data, rests on the published
                bound, or there is no guarantee. `guarantee()` says which.
        """
        return self._account.fixed_epsilon(delta)

    def breakdown(self) -> dict[str, float]:
        """Return the "mixing", "screening", "conversion" and "total" of ε (Table 2b).

        docs/privacy.md, sections 2, 4, 5 and 11 to 13.

        "total" equals `guarantee().epsilon`; with unprotected answers "mixing" and "total" are inf.
        """
        parts = vars(self._account.parts())
        return {name: parts[name] for name in ("mixing", "screening", "conversion", "total")}

    def state(self) -> dict[str, Any]:
        """Return settings and totals as JSON values, exact to the bit: private."""
        return self._account.state()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Accountant:
        """Return an accountant that goes on where `state()` was asked; it has no ledger.

        For an evaluation that is resumed. Two accountants that go on from one state both spend what
        was left.

        Raises:
            ValueError: it is no such state.
        """
        account = Account.from_state(state)
        accountant = cls(**vars(account.settings))
        accountant._account = account
        return accountant

    def goes_on_from(self, other: Accountant) -> bool:
        """Whether the other one has the same settings, and is bound to the same or to nothing."""
        mine, found = self._account, other._account
        return mine.settings == found.settings and found.binding in (None, mine.binding)

    def close(self) -> None:
        """Close the ledger file and let another writer in. Closing twice is allowed."""
        with self._lock:
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Accountant:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an accountant must not be copied or pickled: each of the two would spend the budget"
        )

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                "an accountant must be used in the process that made it: parent and child of a "
                "fork would each spend its budget"
            )


_accountants: weakref.WeakSet[Accountant] = weakref.WeakSet()


def _leave_in_child() -> None:
    # Besides its process id, which a child in a new namespace can share with its parent. Another
    # thread of the parent may have held a lock at the fork.
    for one in list(_accountants):
        one._lock = threading.Lock()
        one._process = 0


os.register_at_fork(after_in_child=_leave_in_child)
