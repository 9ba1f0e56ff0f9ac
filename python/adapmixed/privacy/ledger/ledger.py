"""The ledger: every charge on the device before its answer is released.

`docs/ledger.md` states what is promised and what is not. In short, a charge is

1. added to a copy of the totals, so that what cannot be charged is refused before anything is
   written;
2. committed to the database, which returns when the record is on the device;
3. written to the head file, count and hash, and flushed;
4. and only then returned from.

Killed before 2 is over, the charge may be missing, and nothing was released. Killed after, it is
counted, released or not. A head one record behind is what a kill between 2 and 3 leaves: it is
brought forward when the ledger is opened. A database behind its head has lost charges: refused.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from adapmixed.privacy.accountant import Accountant
from adapmixed.privacy.events import Caveat, Event
from adapmixed.privacy.filter import PerModelFilter
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.ledger.errors import (
    LedgerClosedError,
    LedgerCorruptError,
    LedgerError,
    LedgerWriteError,
)
from adapmixed.privacy.ledger.head import Head, HeadFile, flush_folder
from adapmixed.privacy.ledger.reading import Reading, check_head, head_path, read, torn_words
from adapmixed.privacy.ledger.records import Description, Record, Tail, replay
from adapmixed.privacy.ledger.store import Store, create_database


class Ledger:
    """The one writer of a ledger; made by :meth:`open`. Threads may share it.

    After a failed charge, and in a forked child, it refuses to charge; opening it again tells what
    is on the device.
    """

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        delta: float,
        configuration: str,
        rule: str = "per_model",
        order_weights: Sequence[float] | None = None,
        adjacency: str | None = None,
        filter_budget: FilterBudget | None = None,
        create: bool = True,
    ) -> Ledger:
        """Opens a ledger for charging, or creates it where there is none.

        Args:
            path: of the database, on a local file system; the head file lies beside it.
            delta, rule, order_weights, adjacency, filter_budget: as of `Accountant`, fixed when the
                ledger is created.
            configuration: says what is charged, for instance the mechanism's `repr`; fixed, too.
            create: False refuses where there is no ledger.

        Raises:
            ValueError: bad arguments.
            LedgerMismatchError: it was created with other arguments.
            LedgerBusyError: it has another writer.
            LedgerCorruptError: altered, truncated, rolled back, or of an unknown format.
            LedgerOlderError: intact, but charged by an older accounting: begin another.
            LedgerWriteError: it cannot be read or written.
        """
        accountant = Accountant(
            delta,
            rule=rule,
            order_weights=order_weights,
            adjacency=adjacency,
            filter_budget=filter_budget,
        )
        if not isinstance(configuration, str) or not configuration:
            raise ValueError(
                f"configuration must be a text that is not empty, got {configuration!r}"
            )
        place, head = os.path.realpath(path), None
        wanted = Description.fresh(accountant, configuration)
        try:
            if os.path.lexists(place):
                head = HeadFile(head_path(place))
            elif create:
                head = _begin(place, wanted)
            else:
                raise LedgerWriteError(f"{place} must be a ledger, there is no such file")
            return cls(place, head, wanted)
        except BaseException as error:
            if head is not None:
                head.close()
            if isinstance(error, OSError) and not isinstance(error, LedgerError):
                raise LedgerWriteError(f"{place} could not be opened: {error}") from error
            raise

    def __init__(self, path: str, head: HeadFile, wanted: Description) -> None:
        self.path = path
        self._head = head
        self._lock = threading.Lock()
        self._unusable: str | None = None
        self._process = os.getpid()
        self._store = Store(path, read_only=False)
        try:
            self._description = self._store.description()
            self._accountant = self._description.accountant()
            self._tail = self._catch_up(wanted)
        except BaseException:
            self._store.close()
            raise
        _open.add(self)
        _LOG.info("ledger %s: %d charges", path, self._tail.count)

    def _catch_up(self, wanted: Description) -> Tail:
        """Replays the records and brings the head forward by the one that it may lack."""
        head = self._head.read()
        rows, watch = self._store.rows(), head.count
        tail = replay(rows, self._description, self._accountant, watch=watch)
        check_head(self.path, tail, head)
        self._description.require(wanted)
        if head.torn:
            _LOG.warning("ledger %s: %s", self.path, torn_words(tail.count))
        if tail.count > head.count:
            self._store.settle()
            self._head.write(Head(tail.count, tail.hash))
        return tail

    @staticmethod
    def verify(path: str | os.PathLike[str]) -> Reading:
        """Reads and checks a whole ledger without writing, also while a writer has it open.

        Raises:
            LedgerCorruptError, LedgerOlderError, LedgerWriteError: as :meth:`open`.
        """
        return read(path)

    @property
    def description(self) -> Description:
        """What the ledger was created for."""
        return self._description

    @property
    def charges(self) -> int:
        """Records so far."""
        return self._tail.count

    @property
    def accountant(self) -> Accountant:
        """The totals of everything charged: a copy, so that nothing is added beside the ledger."""
        return self._accountant.copy()

    @property
    def totals(self) -> Guarantee:
        """The guarantee of everything charged."""
        return self._accountant.epsilon()

    def attach(self, model_filter: PerModelFilter) -> None:
        """Says which filter's charges come next, as `Accountant.attach`, once after opening. From
        then on its noisy counts are charged here, each as one record before it is known.

        Raises:
            ValueError: as there.
            LedgerClosedError: as :meth:`charge`.
        """
        with self._lock:
            self._check_usable()
            self._accountant.attach(model_filter, record=self.charge)

    def charge(self, events: Event | Iterable[Event]) -> None:
        """Charges events as one record, all or none; durable when this returns.

        Raises:
            ValueError: events that the accountant refuses or the ledger does not know, or answers
                from a seeded source; nothing was written and the ledger stays usable.
            LedgerClosedError: closed, failed before, forked, or a file was replaced.
            LedgerBusyError, LedgerWriteError: nothing may be released; the charge may be found
                when the ledger is opened again. This object refuses further charges.
        """
        with self._lock:
            self._check_usable()
            listed: tuple[Any, ...] = tuple(events) if isinstance(events, Iterable) else (events,)
            if not listed:
                raise ValueError("events must hold at least one event, got none")
            if Caveat("seeded") in listed:
                raise ValueError(
                    "events must be those of answers from SecureRandom(), got seeded ones: whoever "
                    "knows a seed can undo the randomness"
                )
            total = self._accountant.copy().add(listed)
            count, last = self._tail.count + 1, self._tail.hash
            record = Record.make(self._description, count, last, listed, total)
            try:
                self._commit(record)
                self._accountant, self._tail = total, Tail(count, record.hash, None)
            except BaseException as error:
                self._unusable = f"a charge failed ({error or type(error).__name__})"
                raise

    def _commit(self, record: Record) -> None:
        try:
            self._store.check_in_place()
            self._head.check_in_place()
            self._store.append(record)
            self._head.write(Head(record.sequence, record.hash))
        except OSError as error:
            if isinstance(error, LedgerError):
                raise
            raise LedgerWriteError(f"{self._head.path} could not be written: {error}") from error

    def _check_usable(self) -> None:
        if self._unusable is None and os.getpid() != self._process:
            self._unusable = "it belongs to the process that opened it"
        if self._unusable is not None:
            raise LedgerClosedError(f"{self.path} must be opened again: {self._unusable}")

    def close(self) -> None:
        """Closes the files and lets another writer in. Closing twice is allowed."""
        with self._lock:
            _open.discard(self)
            if os.getpid() == self._process and self._unusable != _FORKED:
                self._store.close()
                self._head.close()
            self._unusable = self._unusable or "it was closed"

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_LOG = logging.getLogger(__name__)
_FORKED = "it belongs to the process that was forked"
_open: weakref.WeakSet[Ledger] = weakref.WeakSet()


def _leave_in_child() -> None:
    # The child must neither charge nor keep the lock when the parent ends.
    for ledger in list(_open):
        ledger._lock = threading.Lock()
        ledger._unusable = _FORKED
        ledger._head.close()
    _open.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def _begin(path: str, description: Description) -> HeadFile:
    """Makes a ledger where there is no database; its locked head.

    The head first: where it is as it was made, a missing database has lost nothing. One that a
    crash has left so is removed and the creation begun again; any other is refused.
    """
    place = head_path(path)
    if os.path.lexists(place):
        head = HeadFile(place)
        try:
            if os.path.lexists(path):  # another process was faster, and has ended
                return head
            count = head.read().count
            if count > 0:
                raise LedgerCorruptError(
                    f"{path} must hold {count} charges, as {place} says, there is no such file"
                )
            if not head.untouched():
                raise LedgerCorruptError(
                    f"{path} must be there, as {place} is not as it was made: something was charged"
                )
            os.unlink(place)
            flush_folder(path)
        except BaseException:
            head.close()
            raise
        head.close()
    head = HeadFile.create(place, Head(0, description.first_hash))
    try:
        create_database(path, description)
    except BaseException:
        head.close()
        raise
    return head
