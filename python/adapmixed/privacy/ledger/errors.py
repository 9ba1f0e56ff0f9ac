"""What a ledger refuses. Every refusal is a `LedgerError` and a ValueError or an OSError."""

from __future__ import annotations

import sqlite3


class LedgerError(Exception):
    """The ledger is refused; nothing may be released on it."""


class LedgerCorruptError(LedgerError, ValueError):
    """What the files hold is no intact ledger: altered, truncated, rolled back or unknown."""


class LedgerMismatchError(LedgerError, ValueError):
    """The ledger was opened for something else than it was created for."""


class LedgerOlderError(LedgerError, ValueError):
    """An older version charged it by other totals: it is intact, and takes no more charges."""


class LedgerClosedError(LedgerError, ValueError):
    """Charged after close, after a failed charge, or in a forked child."""


class LedgerBusyError(LedgerError, OSError):
    """Another writer holds the ledger."""


class LedgerWriteError(LedgerError, OSError):
    """A file could not be read or written: full disk, missing permission, failed device."""


_DEVICE = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}


def from_sqlite(path: str, error: sqlite3.Error) -> LedgerError:
    """The refusal that an error of SQLite amounts to; what is not the device's is corruption."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
    if primary in _BUSY:
        return LedgerBusyError(f"{path} is locked by another program: {error}")
    if primary in _DEVICE:
        return LedgerWriteError(f"{path} could not be read or written: {error}")
    return LedgerCorruptError(f"{path} is not an intact ledger: {error}")
