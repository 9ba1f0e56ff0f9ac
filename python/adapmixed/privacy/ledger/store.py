"""An open ledger database: SQLite in WAL mode, with one transaction per charge."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from adapmixed.errors import LedgerClosedError, LedgerCorruptError, LedgerWriteError
from adapmixed.privacy.ledger.database import APPLICATION_ID, SCHEMA, connect, translated
from adapmixed.privacy.ledger.records import (
    FORMAT_VERSION,
    Chain,
    Checkpoint,
    Description,
    Record,
)

_COLUMNS = "sequence, text, hash"


class Store:
    """An open database. Not thread safe.

    Args:
        path: path of an existing database.
        read_only: if True, read one consistent state, whatever a writer does meanwhile, and check
            every page of the file.
        immutable: if True, and the store is read-only, read the database file alone. The caller
            checks with `at_rest` that no writer was at work.

    Raises:
        LedgerCorruptError: the file is not an intact ledger, or it has another format.
        LedgerBusyError: another program has locked the file.
        LedgerWriteError: the file cannot be opened.
    """

    def __init__(self, path: str, *, read_only: bool, immutable: bool = False) -> None:
        self.path = path
        with translated(path):
            self._connection = connect(
                path, "ro" if read_only else "rw", immutable=immutable and read_only
            )
            try:
                if read_only:
                    self._connection.execute("BEGIN")
                self._check_header()
                if not read_only:
                    self._make_durable()
                elif (found := self._value("PRAGMA quick_check(1)")) != "ok":
                    raise LedgerCorruptError(f"{path} is damaged: {found}")
                schema = dict(self._connection.execute("SELECT name, sql FROM sqlite_master"))
                if schema != SCHEMA:
                    raise LedgerCorruptError(f"{path} does not have the tables of a ledger")
                self._opened = os.stat(path)
            except BaseException as error:
                self._connection.close()
                if isinstance(error, FileNotFoundError):
                    raise LedgerWriteError(f"{path} was removed: {error}") from error
                raise

    def _value(self, statement: str) -> Any:
        row = self._connection.execute(statement).fetchone()
        return None if row is None else row[0]

    def _check_header(self) -> None:
        if self._value("PRAGMA application_id") != APPLICATION_ID:
            raise LedgerCorruptError(f"{self.path} is not the database of a ledger")
        version = self._value("PRAGMA user_version")
        if version != FORMAT_VERSION:
            raise LedgerCorruptError(
                f"{self.path} must have format_version {FORMAT_VERSION}, got {version}: another "
                "version of adapmixed wrote it, and this one cannot read it"
            )

    def _make_durable(self) -> None:
        mode = self._value("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise LedgerWriteError(
                f"{self.path} must lie on a local file system that supports SQLite's WAL mode, got "
                f"journal mode {mode!r}"
            )
        for setting, value in (("synchronous", 2), ("fullfsync", 1), ("checkpoint_fullfsync", 1)):
            self._connection.execute(f"PRAGMA {setting} = {value}")
            if self._value(f"PRAGMA {setting}") != value:
                raise LedgerWriteError(f"{self.path}: SQLite refuses {setting} = {value}")
        # A write that is rolled back, so that a read-only file raises here.
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        self._connection.execute("ROLLBACK")

    def description(self) -> Description:
        """Return the settings that the ledger was created with."""
        (text,) = self._row("SELECT text FROM description", (str,))
        return Description.parse(text)

    def chain(self) -> Chain:
        """Return the end of the chain, from the last two records and the checkpoint.

        Raises:
            LedgerCorruptError: the records and the checkpoint do not fit each other.
        """
        checkpoint, description = self.checkpoint(), self.description()
        with translated(self.path):
            query = f"SELECT {_COLUMNS} FROM record ORDER BY sequence DESC LIMIT 2"
            last = [_record(row) for row in self._connection.execute(query)]
        count = last[0].sequence if last else 0
        if count != checkpoint.sequence:
            raise LedgerCorruptError(
                f"{self.path} holds {count} records, but its checkpoint is of {checkpoint.sequence}"
            )
        hashes = [*(one.hash for one in last), description.first_hash]
        if count and (count < len(last) or not last[0].follows(hashes[1])):
            raise LedgerCorruptError(f"record {count} was altered: its hash does not fit")
        account = checkpoint.account(description, hashes[0])
        return Chain(description.first_hash, count, hashes[0], account)

    def checkpoint(self) -> Checkpoint:
        """Return the stored checkpoint without any check."""
        query = "SELECT sequence, text, digest FROM checkpoint"
        return Checkpoint(*self._row(query, (int, str, bytes)))

    def _row(self, query: str, kinds: tuple[type, ...]) -> Any:
        with translated(self.path):
            rows = self._connection.execute(query).fetchall()
        if len(rows) != 1 or tuple(map(type, rows[0])) != kinds:
            raise LedgerCorruptError(f"{self.path} must have one row for: {query}")
        return rows[0]

    def records(self) -> Iterator[Record]:
        """Yield the records in order without any check."""
        with translated(self.path):
            found = self._connection.execute(f"SELECT {_COLUMNS} FROM record ORDER BY sequence")
        while True:
            with translated(self.path):
                row = found.fetchone()
            if row is None:
                return
            yield _record(row)

    def append(self, record: Record, before: Checkpoint, after: Checkpoint) -> None:
        """Add a record and replace the checkpoint. Both are on the device when this returns.

        Args:
            record: the record to add.
            before: the checkpoint that must be stored now.
            after: the checkpoint with the record.

        Raises:
            LedgerClosedError: the stored checkpoint is not `before`, so another writer charged.
        """
        with translated(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if self.checkpoint() != before:
                    raise LedgerClosedError(f"{self.path} was charged by another writer")
                insert = f"INSERT INTO record ({_COLUMNS}) VALUES (?, ?, ?)"
                self._connection.execute(insert, tuple(vars(record).values()))
                update = "UPDATE checkpoint SET sequence = ?, text = ?, digest = ?"
                self._connection.execute(update, tuple(vars(after).values()))
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    with suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                raise

    def check_in_place(self) -> None:
        """Raise LedgerClosedError if the path no longer names the opened database."""
        try:
            there = os.stat(self.path)
        except OSError as error:
            raise LedgerClosedError(f"{self.path} was removed while it was open") from error
        if not os.path.samestat(there, self._opened):
            raise LedgerClosedError(f"{self.path} was replaced while it was open")

    def close(self) -> None:
        """Close the connection and drop changes that were not committed."""
        self._connection.close()


def _record(row: tuple[Any, ...]) -> Record:
    if tuple(map(type, row)) != (int, str, bytes):
        raise LedgerCorruptError(f"record {row[0]!r} does not have the columns of a record")
    return Record(*row)
