"""The writer of a ledger: every charge is on the device before its answer is released.

docs/how-to/keep-a-ledger.md states the promises and their limits. A charge takes four steps:

1. It is added to a copy of the totals. If it cannot be charged, this raises before a write.
2. It is committed to the database with a checkpoint of the totals. Both are then on the device.
3. Its count and hash are written to the head file and flushed.
4. The call returns, and the answer may be released.

If the process is killed during step 2, the charge may be missing, but nothing was released. If it
is killed later, the charge is counted, released or not. A kill between steps 2 and 3 leaves a head
that is one record behind, which the next opening mends. A database that is behind its head has lost
charges, and raises.
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
    """The one writer of a ledger, made by :meth:`open`. Not thread safe.

    After a failed charge, and in a forked child, it can charge no more. Open the ledger again to
    learn what is on the device.
    """

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], account: Account, *, create: bool
    ) -> tuple[LedgerFile, Account]:
        """Open a ledger for charging, or create it.

        Args:
            path: path of the database on a local file system. The head file lies next to it.
            account: new account with the settings that the ledger must have.
            create: if False, raise LedgerWriteError if there is no ledger.

        Returns:
            The writer, and the account of all charges in the ledger.

        Raises:
            LedgerMismatchError: the ledger was created with other settings.
            LedgerBusyError: the ledger has another writer.
            LedgerCorruptError: the ledger was altered, truncated or rolled back, or it has another
                format.
            LedgerWriteError: the ledger cannot be read or written.
        """
        place, head = os.path.realpath(path), None
        try:
            if os.path.isdir(place):
                raise LedgerWriteError(f"{place} must be the file of a ledger, got a folder")
            if os.path.lexists(place):
                head = HeadFile(head_path(place))
            elif create:
                head = _begin(place, account)
            else:
                raise LedgerWriteError(f"{place} must be a ledger, but there is no such file")
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
        """Check the end of the chain, and add the one record that the head may lack."""
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
        """Number of records so far."""
        return self._chain.count

    def append(self, entry: Mapping[str, Any], before: Account, after: Account) -> None:
        """Add one record, which is durable when this returns.

        After an error, nothing may be released, and this object can charge no more. The ledger may
        hold the charge when it is opened again.

        Args:
            entry: {"events": [...]}, or {"binding": {...}} as JSON values.
            before: the account without the record.
            after: the account with the record.

        Raises:
            LedgerClosedError: the ledger is closed, a charge failed before, the process was forked,
                or a file was replaced.
            LedgerBusyError: another program has locked a file.
            LedgerWriteError: a file cannot be written.
        """
        if before is not self._chain.account:  # interrupted between the file and memory
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
        """Close the files, so that another writer can open them. To close twice is allowed."""
        _open.discard(self)
        if os.getpid() == self._process and self._unusable != _FORKED:
            self._store.close()
            self._head.close()
        self._unusable = self._unusable or "it was closed"


_open: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


def _leave_in_child() -> None:
    # The child must not charge, and must not keep the lock after the parent has ended.
    for ledger in list(_open):
        ledger._unusable = _FORKED
        ledger._head.close()
    _open.clear()


os.register_at_fork(after_in_child=_leave_in_child)


def _begin(path: str, account: Account) -> HeadFile:
    """Create a ledger if there is no database; return its locked head.

    The head is created first. If it is unchanged, a missing database has lost nothing: a crash left
    it so, and the creation begins again. Any other head without a database raises.
    """
    place = head_path(path)
    if os.path.lexists(place):
        head = HeadFile(place)
        try:
            if os.path.lexists(path):  # another process created it and has ended
                return head
            count = head.read().count
            if count > 0:
                raise LedgerCorruptError(
                    f"{path} must hold {count} charges, as {place} says, but there is no such file"
                )
            if not head.untouched():
                raise LedgerCorruptError(
                    f"{path} must exist, because {place} is not as it was made, but there is no "
                    "such file"
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
        if not os.path.lexists(path):  # so nothing can have been charged
            os.unlink(place)
        head.close()
        raise
    return head
