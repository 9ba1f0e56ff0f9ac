"""The writer of a ledger: every charge is on the device before its answer is released.

docs/how-to/keep-a-ledger.md states the promises and their limits. A charge takes three steps:

1. It is added to a copy of the totals. If it cannot be charged, this raises before a write.
2. It is committed to the database with a checkpoint of the totals. Both are then on the device.
3. The call returns, and the answer may be released.

If the process is killed during step 2, the charge may be missing, but nothing was released. If it
is killed later, the charge is counted, released or not.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from adapmixed.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerError,
    LedgerMismatchError,
    LedgerWriteError,
)
from adapmixed.files import check_locks
from adapmixed.privacy.account import Account
from adapmixed.privacy.ledger.database import create_database, remove
from adapmixed.privacy.ledger.records import Chain, Checkpoint, Description, Record
from adapmixed.privacy.ledger.store import Store

_LOG = logging.getLogger(__name__)


class LedgerFile:
    """The one writer of a ledger, made by :meth:`open`. Not thread safe.

    After a failed charge it can charge no more. Open the ledger again to learn what is on the
    device.
    """

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], account: Account, *, create: bool
    ) -> tuple[LedgerFile, Account]:
        """Open a ledger for charging, or create it.

        Args:
            path: path of the database on a local file system. A lock file lies next to it.
            account: new account with the settings that the ledger must have.
            create: if False, raise LedgerWriteError if there is no ledger.

        Returns:
            The writer, and the account of all charges in the ledger.

        Raises:
            LedgerMismatchError: the ledger was created with other settings.
            LedgerBusyError: the ledger has another writer.
            LedgerCorruptError: the ledger was altered, or it has another format.
            LedgerWriteError: the ledger cannot be read or written.
            ValueError: the file system has no locks.
        """
        place, lock = os.path.realpath(path), None
        try:
            if os.path.isdir(place):
                raise LedgerWriteError(f"{place} must be the file of a ledger, got a folder")
            if not create and not os.path.lexists(place):
                raise LedgerWriteError(f"{place} must be a ledger, but there is no such file")
            check_locks(place)
            lock = _Lock(f"{place}-lock")
            if not os.path.lexists(place):
                description = Description.fresh(account.settings)
                create_database(place, description, Checkpoint.make(Chain.start(description)))
            opened = cls(place, lock, account)
            return opened, opened._chain.account
        except BaseException as error:
            if lock is not None:
                lock.close()
            if isinstance(error, OSError) and not isinstance(error, LedgerError):
                raise LedgerWriteError(f"{place} could not be opened: {error}") from error
            raise

    def __init__(self, path: str, lock: _Lock, account: Account) -> None:
        self.path = path
        self._lock = lock
        self._unusable: str | None = None
        self._store = Store(path, read_only=False)
        try:
            self._chain = self._store.chain()
            self._checkpoint = self._store.checkpoint()
            self.identity = self._store.description().identity
            _check_settings(account, self._chain.account)
        except BaseException:
            self._store.close()
            raise
        _LOG.info("ledger %s: %d records", path, self._chain.count)

    @property
    def count(self) -> int:
        """Number of records so far."""
        return self._chain.count

    def append(self, entry: Mapping[str, Any], before: Account, after: Account) -> None:
        """Add one record, which is durable when this returns.

        After an error, nothing may be released, and this object can charge no more. The ledger may
        hold the charge when it is opened again.

        Args:
            entry: {"events": [Event, ...]}, or {"binding": Binding}.
            before: the account without the record.
            after: the account with the record.

        Raises:
            LedgerClosedError: the ledger is closed, a charge failed before, or the file was
                replaced.
            LedgerBusyError: another program has locked the file.
            LedgerWriteError: the file cannot be written.
        """
        if before is not self._chain.account:  # interrupted between the file and memory
            self._unusable = self._unusable or "a charge was interrupted"
        if self._unusable is not None:
            raise LedgerClosedError(f"{self.path} must be opened again: {self._unusable}")
        record = Record.make(self._chain.count + 1, self._chain.hash, entry)
        chain = self._chain.after(record, after)
        checkpoint = Checkpoint.make(chain)
        try:
            self._store.check_in_place()
            self._store.append(record, self._checkpoint, checkpoint)
        except BaseException as error:
            self._unusable = f"a charge failed ({error or type(error).__name__})"
            raise
        self._chain, self._checkpoint = chain, checkpoint

    def close(self, *, empty: bool = True) -> None:
        """Close the files for another writer; unless `empty`, remove a ledger without charges."""
        self._store.close()
        if not empty and self._unusable is None and self._chain.account.empty:
            with suppress(LedgerClosedError):  # another file has its path
                self._store.check_in_place()
                remove(self.path)
        self._lock.close()
        self._unusable = self._unusable or "it was closed"


class _Lock:
    """The lock that keeps out a second writer, in this process and in others.

    The system drops it when the process and its forked children end, however they end. The file
    stays: to remove it could let in two writers.

    Args:
        path: path of the lock file.

    Raises:
        LedgerBusyError: another writer holds it.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._owner = -1
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._owner = os.getpid()
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError | PermissionError):
                raise LedgerBusyError(
                    f"{path} is held by another writer: one process at a time may charge a ledger"
                ) from None
            raise

    def close(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            file, self._file = self._file, -1
            if os.getpid() == self._owner:  # a forked child must not, as its parent holds it
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()


def _check_settings(wanted: Account, found: Account) -> None:
    for name, value in vars(wanted.settings).items():
        kept = getattr(found.settings, name)
        if value != kept:
            raise LedgerMismatchError(
                f"{name} must be what the ledger was created with, {kept!r}, got {value!r}"
            )
