"""The database of a ledger: SQLite in WAL mode, one transaction per charge."""

from __future__ import annotations

import errno
import os
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from adapmixed.privacy.ledger.errors import (
    LedgerClosedError,
    LedgerCorruptError,
    LedgerWriteError,
    from_sqlite,
)
from adapmixed.privacy.ledger.head import check_same, flush_folder
from adapmixed.privacy.ledger.records import FORMAT_VERSION, Description, Record

APPLICATION_ID = 0x4144504D  # "ADPM", in the header of the file
BUSY_SECONDS = 5.0

_SCHEMA = {
    "description": "CREATE TABLE description (\n"
    "  one INTEGER PRIMARY KEY CHECK (one = 1),\n"
    "  text TEXT NOT NULL\n"
    ")",
    "record": "CREATE TABLE record (\n"
    "  sequence INTEGER PRIMARY KEY,\n"
    "  format_version INTEGER NOT NULL,\n"
    "  configuration BLOB NOT NULL,\n"
    "  events TEXT NOT NULL,\n"
    "  charges BLOB NOT NULL,\n"
    "  totals TEXT NOT NULL,\n"
    "  hash BLOB NOT NULL\n"
    ")",
}
for _table in ("description", "record"):
    for _act in ("UPDATE", "DELETE"):
        _SCHEMA[f"no_{_act.lower()}_of_{_table}"] = (
            f"CREATE TRIGGER no_{_act.lower()}_of_{_table} BEFORE {_act} ON {_table} "
            "BEGIN SELECT RAISE(ABORT, 'a ledger is only ever added to'); END"
        )
_COLUMNS = "sequence, format_version, configuration, events, charges, totals, hash"


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise from_sqlite(path, error) from error
    except UnicodeDecodeError as error:
        raise LedgerCorruptError(f"{path} is not an intact ledger: {error}") from error


def _connect(path: str, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode={mode}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def create_database(path: str, description: Description) -> None:
    """Makes an empty database, whole and durable before it has its name.

    Raises:
        LedgerCorruptError: the write-ahead log of a database that is gone lies there.
        LedgerWriteError: it cannot be written.
    """
    if os.path.lexists(f"{path}-wal"):
        raise LedgerCorruptError(f"{path} must lie beside its {path}-wal, there is none")
    fresh = f"{path}-new"
    try:
        for suffix in ("", "-journal", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(fresh + suffix)
        os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with _refusing(path):
            connection = _connect(fresh, "rw")
            try:
                # In this mode from the start: to change it later is a step that can be cut short.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA fullfsync = ON")
                connection.execute("PRAGMA checkpoint_fullfsync = ON")
                connection.execute("BEGIN IMMEDIATE")
                for statement in _SCHEMA.values():
                    connection.execute(statement)
                connection.execute("INSERT INTO description VALUES (1, ?)", (description.text,))
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {description.format_version}")
                connection.execute("COMMIT")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.close()
        if os.path.lexists(f"{fresh}-wal"):
            raise OSError(errno.EIO, "the new database could not be completed")
        os.rename(fresh, path)
        flush_folder(path)
    except OSError as error:
        if isinstance(error, LedgerWriteError):
            raise
        raise LedgerWriteError(f"{path} could not be created: {error}") from error


class Store:
    """An open database. Not thread safe.

    Args:
        path: of the database, which exists.
        read_only: one consistent state is read, whatever a writer does meanwhile.

    Raises:
        LedgerCorruptError: no intact ledger, or one of a newer format.
        LedgerBusyError, LedgerWriteError: it cannot be opened.
    """

    def __init__(self, path: str, *, read_only: bool) -> None:
        self.path = path
        if any(store.path == path for store in _inherited):
            raise LedgerClosedError(
                f"{path} was open when this process was forked: start a new process to open it"
            )
        with _refusing(path):
            self._connection = _connect(path, "ro" if read_only else "rw")
            try:
                if read_only:
                    self._connection.execute("BEGIN")
                self._check_header()
                if not read_only:
                    self._make_durable()
                self._check_content()
                self._opened = os.stat(path)
            except BaseException as error:
                self._connection.close()
                if isinstance(error, FileNotFoundError):
                    raise LedgerWriteError(f"{path} was taken away: {error}") from error
                raise
        _open.add(self)

    def _value(self, statement: str) -> Any:
        row = self._connection.execute(statement).fetchone()
        return None if row is None else row[0]

    def _check_header(self) -> None:
        if self._value("PRAGMA application_id") != APPLICATION_ID:
            raise LedgerCorruptError(f"{self.path} is not the database of a ledger")
        version = self._value("PRAGMA user_version")
        if version > FORMAT_VERSION:
            raise LedgerCorruptError(
                f"{self.path} has format_version {version}, written by a newer version of "
                f"adapmixed; this one reads up to {FORMAT_VERSION}"
            )
        if version < 1:
            raise LedgerCorruptError(f"{self.path}: format_version must be >= 1, got {version}")

    def _make_durable(self) -> None:
        mode = self._value("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise LedgerWriteError(
                f"{self.path} must lie on a local file system that can share memory (WAL), the "
                f"journal mode stays {mode!r}"
            )
        for setting, value in (("synchronous", 2), ("fullfsync", 1), ("checkpoint_fullfsync", 1)):
            self._connection.execute(f"PRAGMA {setting} = {value}")
            if self._value(f"PRAGMA {setting}") != value:
                raise LedgerWriteError(f"{self.path}: SQLite refuses {setting} = {value}")
        # A write that is taken back: where the file is read-only it is refused here.
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        self._connection.execute("ROLLBACK")

    def _check_content(self) -> None:
        schema = dict(self._connection.execute("SELECT name, sql FROM sqlite_master"))
        if schema != _SCHEMA:
            raise LedgerCorruptError(f"{self.path} does not have the tables of a ledger")
        found = self._value("PRAGMA quick_check(1)")
        if found != "ok":
            raise LedgerCorruptError(f"{self.path} is damaged: {found}")

    def description(self) -> Description:
        """What the ledger was created for."""
        with _refusing(self.path):
            texts = self._connection.execute("SELECT text FROM description").fetchall()
        if len(texts) != 1 or type(texts[0][0]) is not str:
            raise LedgerCorruptError(f"{self.path} must have one description, got {len(texts)}")
        description = Description.parse(texts[0][0])
        with _refusing(self.path):
            version = self._value("PRAGMA user_version")
        if version != description.format_version:
            raise LedgerCorruptError(
                f"{self.path}: format_version must be that of its description, "
                f"{description.format_version}, got {version}"
            )
        return description

    def rows(self) -> Iterator[Sequence[Any]]:
        """The records by sequence, unchecked."""
        query = f"SELECT {_COLUMNS} FROM record ORDER BY sequence"
        with _refusing(self.path):
            found = self._connection.execute(query)
        while True:
            with _refusing(self.path):
                row = found.fetchone()
            if row is None:
                return
            yield row

    def append(self, record: Record) -> None:
        """Adds a record; it is on the device when this returns."""
        row = tuple(record.__dict__.values())
        with _refusing(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(f"INSERT INTO record ({_COLUMNS}) VALUES (?,?,?,?,?,?,?)", row)
            self._connection.execute("COMMIT")

    def settle(self) -> None:
        """Makes durable what a killed writer may have left in the system's cache.

        Before the head names it: a power failure between the two would leave a head that says more
        than the database, which is refused.
        """
        with _refusing(self.path):
            busy = self._value("PRAGMA wal_checkpoint(FULL)")
        if busy:
            raise LedgerWriteError(f"{self.path} could not be made durable: it is being read")

    def check_in_place(self) -> None:
        """Raises LedgerClosedError if the path no longer names the opened database."""
        check_same(self.path, self._opened)

    def close(self) -> None:
        """Closes the connection; what was not committed is lost."""
        _open.discard(self)
        self._connection.close()


_open: weakref.WeakSet[Store] = weakref.WeakSet()
_inherited: list[Store] = []


def _keep_in_child() -> None:
    # SQLite forbids a child to use inherited connections, even to close them, and takes the locks
    # of the parent for its own when the same file is opened again.
    _inherited.extend(_open)
    _open.clear()


os.register_at_fork(after_in_child=_keep_in_child)
