"""The ledger file: every charge on the device before its answer is released.

`docs/ledger.md` states what is promised and what is not. In short, a charge is

1. added to a copy of the totals, so that what cannot be charged raises before anything is written;
2. committed to the database with a checkpoint of the totals, which returns when both are on the
   device;
3. written to the head file, count and hash, and flushed;
4. and only then returned from.

Killed before 2 is over, the charge may be missing, and nothing was released. Killed after, it is
counted, released or not. A head one record behind is what a kill between 2 and 3 leaves: it is
brought forward when the ledger is opened. A database behind its head has lost charges and raises.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping
from typing import Any

from adapmixed.errors import (
    LedgerClosedError,
    LedgerCorruptError,
    LedgerError,
    LedgerMismatchError,
    LedgerWriteError,
)
from adapmixed.privacy.account import Account
from adapmixed.privacy.ledger.database import create_database
from adapmixed.privacy.ledger.head import Head, HeadFile, flush_folder, head_path
from adapmixed.privacy.ledger.reading import check_head, old_head, torn_words
from adapmixed.privacy.ledger.records import Chain, Checkpoint, Description, Record
from adapmixed.privacy.ledger.store import Store

_LOG = logging.getLogger(__name__)
_FORKED = "it belongs to the process that was forked"


class LedgerFile:
    """The one writer of a ledger; made by :meth:`open`. Not thread safe.

    After a failed charge, and in a forked child, it can charge no more; opening it again tells what
    is on the device.
    """

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], account: Account, *, create: bool
    ) -> tuple[LedgerFile, Account]:
        """Open a ledger for charging, or create it; return it with its account.

        Args:
            path: of the database, on a local file system; the head file lies beside it.
            account: a new one, with the settings that the ledger must have.
            create: False raises if there is no ledger.

        Raises:
            LedgerMismatchError: it was created with other settings.
            LedgerBusyError: it has another writer.
            LedgerCorruptError: altered, truncated, rolled back, or of another format.
            LedgerWriteError: it cannot be read or written.
        """
        place, head = os.path.realpath(path), None
        try:
            if os.path.lexists(place):
                head = HeadFile(head_path(place))
            elif create:
                head = _begin(place, account)
            else:
                raise LedgerWriteError(f"{place} must be a ledger, there is no such file")
            opened = cls(place, head, account)
            return opened, opened._chain.account
        except BaseException as error:
            if head is not None:
                head.close()
            if isinstance(error, OSError) and not isinstance(error, LedgerError):
                raise LedgerWriteError(f"{place} could not be opened: {error}") from error
            raise

    def __init__(self, path: str, head: HeadFile, account: Account) -> None:
        self.path = path
        self._head = head
        self._unusable: str | None = None
        self._process = os.getpid()
        self._store = Store(path, read_only=False)
        try:
            self._chain = self._catch_up(account)
        except BaseException:
            self._store.close()
            raise
        self._checkpoint = self._store.checkpoint()
        _open.add(self)
        _LOG.info("ledger %s: %d records", path, self._chain.count)

    def _catch_up(self, account: Account) -> Chain:
        """Check where the chain ends, and bring the head forward by the one that it may lack."""
        head, chain = self._head.read(), self._store.chain()
        check_head(self.path, chain, head)
        if chain.count > head.count + 1:
            raise old_head(self.path, chain, head)
        wanted, found = vars(account.settings), vars(chain.account.settings)
        for name in wanted:
            if wanted[name] != found[name]:
                raise LedgerMismatchError(
                    f"{name} must be what the ledger was created with, {found[name]!r}, got "
                    f"{wanted[name]!r}"
                )
        if head.torn:
            _LOG.warning("ledger %s: %s", self.path, torn_words(chain.count))
        if chain.count > head.count:
            self._store.settle()
            self._head.write(Head(chain.count, chain.hashes[0]))
        return chain

    @property
    def count(self) -> int:
        """Records so far."""
        return self._chain.count

    def append(self, entry: Mapping[str, Any], before: Account, after: Account) -> None:
        """Add one record; durable when this returns.

        Args:
            entry: {"events": [...]}, or {"binding": {...}} as it is written.
            before, after: the account without it and with it.

        Raises:
            LedgerClosedError: closed, failed before, forked, or a file was replaced.
            LedgerBusyError, LedgerWriteError: nothing may be released; the charge may be found
                when the ledger is opened again. This object can charge no more.
        """
        if before is not self._chain.account:  # an interruption came between file and memory
            self._unusable = self._unusable or "a charge was interrupted"
        self._check_usable()
        record = Record.make(self._chain.count + 1, self._chain.hashes[0], entry)
        chain = self._chain.after(record, after)
        checkpoint = Checkpoint.make(chain)
        try:
            self._commit(record, checkpoint)
        except BaseException as error:
            self._unusable = f"a charge failed ({error or type(error).__name__})"
            raise
        self._chain, self._checkpoint = chain, checkpoint

    def _commit(self, record: Record, checkpoint: Checkpoint) -> None:
        try:
            self._store.check_in_place()
            self._head.check_in_place()
            self._store.append(record, self._checkpoint, checkpoint)
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
        """Close the files and let another writer in. Closing twice is allowed."""
        _open.discard(self)
        if os.getpid() == self._process and self._unusable != _FORKED:
            self._store.close()
            self._head.close()
        self._unusable = self._unusable or "it was closed"


_open: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


def _leave_in_child() -> None:
    # The child must neither charge nor keep the lock when the parent ends.
    for ledger in list(_open):
        ledger._unusable = _FORKED
        ledger._head.close()
    _open.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def _begin(path: str, account: Account) -> HeadFile:
    """Make a ledger where there is no database; return its locked head.

    The head comes first: if it is as it was made, a missing database has lost nothing. One that a
    crash has left so is removed and the creation begun again; any other raises.
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
    description = Description.fresh(account.settings)
    head = HeadFile.create(place, Head(0, description.first_hash))
    try:
        create_database(path, description, Checkpoint.make(Chain.start(description)))
    except BaseException:
        head.close()
        raise
    return head
