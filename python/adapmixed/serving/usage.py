"""The tokens that each key has used, in a database that survives a restart and a power cut.

Admissions are on the disk before their answers start, and what an answer gives back is written
later. So a process that is killed loses a key at most tokens of its own.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

FORMAT_VERSION = 2


def usage_path(ledger: str | os.PathLike[str]) -> Path:
    """Return the file of used tokens, next to a ledger.

    Args:
        ledger: path of the ledger. Symbolic links to it have the same file of used tokens; hard
            links do not.
    """
    return Path(f"{os.path.realpath(ledger)}.usage")


class Usage:
    """Used tokens by the name of a key. Any thread may call every method.

    Args:
        path: the file; it is made if it is not there.

    Raises:
        ValueError: the file has another format.
        OSError: it is damaged, or cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._lock = Path(path), threading.Lock()
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._database = _open(path)

    def used(self, name: str) -> int:
        """Return the tokens that a key has used."""
        with self._lock, _translated(self._path):
            query = "SELECT tokens FROM used WHERE name = ?"
            row = self._database.execute(query, (name,)).fetchone()
        return 0 if row is None else int(row[0])

    def admit(self, name: str, tokens: int, limit: int | None) -> bool:
        """Count tokens for a key, durably, unless it has too few left.

        Args:
            name: name of the key.
            tokens: largest number of tokens of an admission.
            limit: largest number of tokens that the key may use; None for any.

        Returns:
            True if the tokens were counted.

        Raises:
            OSError: the admission could not be written.
        """
        add = (
            "INSERT INTO used SELECT ?1, ?2 WHERE ?3 IS NULL OR ?2 <= ?3 ON CONFLICT DO UPDATE "
            "SET tokens = tokens + ?2 WHERE ?3 IS NULL OR tokens + ?2 <= ?3"
        )
        with self._lock, _translated(self._path):
            return self._database.execute(add, (name, tokens, limit)).rowcount == 1

    def give_back(self, name: str, tokens: int) -> None:
        """Count tokens of an admission as unused. Each admission gives back once.

        Raises:
            OSError: it could not be written, so the key keeps them counted.
        """
        take = "UPDATE used SET tokens = max(0, tokens - ?) WHERE name = ?"
        with self._lock, _translated(self._path):
            self._database.execute(take, (tokens, name))

    def close(self) -> None:
        """Close the file. To close twice is allowed."""
        self._database.close()


def read_usage(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the tokens that each key has used; a server may write the file meanwhile.

    Raises:
        ValueError: the file has another format.
        OSError: it is damaged, or cannot be read.
    """
    with closing(_open(path)) as database, _translated(path):
        return dict(database.execute("SELECT name, tokens FROM used"))


def _open(path: str | os.PathLike[str]) -> sqlite3.Connection:
    """Open a database of used tokens. Every statement is a transaction that waits for the disk."""
    place = f"{Path(path).absolute().as_uri()}?mode=rw"
    with _translated(path):
        database = sqlite3.connect(place, uri=True, isolation_level=None, check_same_thread=False)
        database.execute("PRAGMA synchronous = EXTRA")
        ((version,),) = database.execute("PRAGMA user_version")
        if version == 0:
            database.executescript(
                "BEGIN; CREATE TABLE used (name TEXT PRIMARY KEY, tokens INTEGER NOT NULL);"
                f"PRAGMA user_version = {FORMAT_VERSION}; COMMIT;"
            )
        elif version != FORMAT_VERSION:
            raise ValueError(f"{path} must have format_version {FORMAT_VERSION}, got {version}")
    return database


@contextmanager
def _translated(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(f"{path} could not be read or written: {error}") from error
