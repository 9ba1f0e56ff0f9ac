"""The database of a ledger: its tables, how it is opened and created, and its errors."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from adapmixed.errors import LedgerBusyError, LedgerCorruptError, LedgerError, LedgerWriteError
from adapmixed.files import flush
from adapmixed.privacy.ledger.records import FORMAT_VERSION, Checkpoint, Description

APPLICATION_ID = 0x4144504D  # "ADPM", in the header of the file
BUSY_SECONDS = 5.0

SCHEMA = {
    "description": "CREATE TABLE description (\n"
    "  one INTEGER PRIMARY KEY CHECK (one = 1),\n"
    "  text TEXT NOT NULL\n"
    ")",
    "record": "CREATE TABLE record (\n"
    "  sequence INTEGER PRIMARY KEY,\n"
    "  text TEXT NOT NULL,\n"
    "  hash BLOB NOT NULL\n"
    ")",
    "checkpoint": "CREATE TABLE checkpoint (\n"
    "  one INTEGER PRIMARY KEY CHECK (one = 1),\n"
    "  sequence INTEGER NOT NULL,\n"
    "  text TEXT NOT NULL,\n"
    "  digest BLOB NOT NULL\n"
    ")",
}
for _table, _act in (
    ("description", "UPDATE"),
    ("description", "DELETE"),
    ("record", "UPDATE"),
    ("record", "DELETE"),
    ("checkpoint", "DELETE"),
):
    SCHEMA[f"no_{_act.lower()}_of_{_table}"] = (
        f"CREATE TRIGGER no_{_act.lower()}_of_{_table} BEFORE {_act} ON {_table} "
        "BEGIN SELECT RAISE(ABORT, 'a ledger is only ever added to'); END"
    )


_DEVICE = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
}
_NEEDS_LOCKS = "a ledger must lie on a file system with locks, such as a local disk"
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn errors of SQLite into LedgerErrors."""
    try:
        yield
    except sqlite3.Error as error:
        raise _from_sqlite(path, error) from error
    except UnicodeDecodeError as error:
        raise LedgerCorruptError(f"{path} is not an intact ledger: {error}") from error


def _from_sqlite(path: str, error: sqlite3.Error) -> LedgerError:
    """Return the LedgerError for an error of SQLite.

    An error that neither a lock nor the device explains counts as corruption.
    """
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if primary in _BUSY:  # SQLite says so after ENOLCK, too
        return LedgerBusyError(
            f"{path} is locked by another program, or cannot be locked ({_NEEDS_LOCKS}): {error}"
        )
    if primary in _DEVICE:
        advice = f"; {_NEEDS_LOCKS}" if "LOCK" in error.sqlite_errorname else ""
        if os.path.lexists(f"{path}-wal") and not os.access(os.path.dirname(path) or ".", os.W_OK):
            advice = f"; copy it, with {path}-wal, to a folder that you may write to"
        return LedgerWriteError(f"{path} could not be read or written: {error}{advice}")
    return LedgerCorruptError(
        f"{path} is not an intact ledger: {error}; if it was one, count it as spent in full"
    )


def connect(path: str, mode: str, *, immutable: bool = False) -> sqlite3.Connection:
    """Open an existing database, read-only with mode "ro" or for writing with mode "rw".

    If `immutable` is set, no other file is read, made or locked; see :func:`at_rest`.
    """
    connection = sqlite3.connect(
        f"file:{quote(path)}?mode={mode}{'&immutable=1' if immutable else ''}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    return connection


def at_rest(path: str) -> tuple[int, ...] | None:
    """Return what tells two states of a database apart, or None if a log may hold charges.

    If it is the same before and after a reading, the file alone held every charge meanwhile.
    """
    for suffix in ("-wal", "-journal"):
        with suppress(FileNotFoundError):
            if os.stat(path + suffix).st_size:
                return None
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def create_database(path: str, description: Description, checkpoint: Checkpoint) -> None:
    """Create an empty database, which is complete and durable before it gets its name.

    Args:
        path: where the database will be.
        description: settings of the ledger.
        checkpoint: checkpoint of a ledger without records.

    Raises:
        LedgerCorruptError: the write-ahead log of a lost database is there.
        LedgerWriteError: the database cannot be written.
    """
    if os.path.lexists(f"{path}-wal"):
        raise LedgerCorruptError(f"{path} must exist if {path}-wal does, but there is no such file")
    fresh = f"{path}-new"
    try:
        remove(fresh)
        os.close(os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        with translated(path):
            connection = connect(fresh, "rw")
            try:
                # WAL from the start: a later change of the mode could be interrupted.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                connection.execute("PRAGMA fullfsync = ON")
                connection.execute("PRAGMA checkpoint_fullfsync = ON")
                connection.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA.values():
                    connection.execute(statement)
                connection.execute("INSERT INTO description VALUES (1, ?)", (description.text,))
                connection.execute(
                    "INSERT INTO checkpoint VALUES (1, ?, ?, ?)", tuple(vars(checkpoint).values())
                )
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
                connection.execute("COMMIT")
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                connection.close()
        if os.path.lexists(f"{fresh}-wal"):
            raise OSError(errno.EIO, "the new database could not be completed")
        os.rename(fresh, path)
        flush(Path(path).parent)
    except OSError as error:
        if isinstance(error, LedgerWriteError):
            raise
        raise LedgerWriteError(f"{path} could not be created: {error}") from error
    finally:
        remove(fresh)


def remove(path: str) -> None:
    """Remove a database and its logs, if they are there."""
    for suffix in ("", "-journal", "-wal", "-shm"):
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)
