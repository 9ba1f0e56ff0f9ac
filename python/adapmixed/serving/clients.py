"""The keys of a server in use: who sends a request, how often, and the tokens left for it.

The tokens that each key has used are a table of the ledger's database. Admissions are on the device
before their answers start, and what an answer gives back is written later. So a process that is
killed loses a key at most tokens of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import threading
import time
from collections.abc import Sequence

from adapmixed.privacy.ledger import WRITING, connected, looked_up, translated
from adapmixed.serving.errors import key_spent, too_fast
from adapmixed.serving.keys import Key


class Usage:
    """Used tokens by the name of a key. Any thread may call every method.

    All methods raise LedgerError if the database is damaged, or cannot be read or written.

    Args:
        ledger: path of a ledger.
    """

    def __init__(self, ledger: str | os.PathLike[str]) -> None:
        self._path = os.path.realpath(ledger)
        with translated(self._path):
            self._database = connected(self._path)

    def used(self, name: str) -> int:
        """Return the tokens that a key has used."""
        with WRITING, translated(self._path):
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
        """
        add = (
            "INSERT INTO used SELECT ?1, ?2 WHERE ?3 IS NULL OR ?2 <= ?3 ON CONFLICT DO UPDATE "
            "SET tokens = tokens + ?2 WHERE ?3 IS NULL OR tokens + ?2 <= ?3"
        )
        with WRITING, translated(self._path):
            return self._database.execute(add, (name, tokens, limit)).rowcount == 1

    def give_back(self, name: str, tokens: int) -> None:
        """Count tokens of an admission as unused. Each admission gives back once.

        If it cannot be written, the key keeps them counted.
        """
        take = "UPDATE used SET tokens = max(0, tokens - ?) WHERE name = ?"
        with WRITING, translated(self._path):
            self._database.execute(take, (tokens, name))

    def close(self) -> None:
        """Close the database. To close twice is allowed."""
        self._database.close()


class Client:
    """A key in use: its tokens and its rate. Any thread may call every method.

    Args:
        key: the key.
        usage: counts the tokens that all keys have used; None to count none.
    """

    def __init__(self, key: Key, usage: Usage | None) -> None:
        self.key, self._usage = key, usage
        self._lock = threading.Lock()
        self._level, self._filled = float(key.requests_per_minute or 0), time.monotonic()

    def check_rate(self) -> None:
        """Count a request.

        A key that has been idle for a minute may send as many requests at once as its limit says,
        and as many again, evenly, in each minute after. So at most twice as many pass in a minute.

        Raises:
            RequestError: 429: more requests came than that. This one is not counted.
        """
        most = self.key.requests_per_minute
        if most is None:
            return
        with self._lock:
            now = time.monotonic()
            self._level = min(most, self._level + (now - self._filled) * most / 60.0)
            self._filled = now
            if self._level < 1:
                raise too_fast(most, (1 - self._level) * 60.0 / most)
            self._level -= 1

    def admit(self, tokens: int) -> None:
        """Count the tokens of a request, durably, before its answer starts.

        Args:
            tokens: largest number of tokens of all its answers.

        Raises:
            RequestError: 429: the key has fewer tokens left. None are counted.
            LedgerError: they could not be counted durably.
        """
        name, limit = self.key.name, self.key.tokens
        if self._usage is not None and not self._usage.admit(name, tokens, limit):
            raise key_spent(max(0, (limit or 0) - self._usage.used(name)))

    def give_back(self, tokens: int) -> None:
        """Give back tokens of a request that its answers did not use. Each gives back once.

        Raises:
            LedgerError: they could not be written, so the key keeps them counted.
        """
        if self._usage is not None and tokens:
            self._usage.give_back(self.key.name, tokens)


class Clients:
    """The keys of a server, found by what a client sends.

    Args:
        keys: keys with different names.
        usage: counts the tokens that keys have used.
    """

    def __init__(self, keys: Sequence[Key], usage: Usage) -> None:
        if not keys:
            raise ValueError("keys must hold at least one key, got none")
        self._usage, self._clients = usage, list[Client]()
        self.replace(keys)

    def replace(self, keys: Sequence[Key]) -> None:
        """Let in these keys alone from now on. Answers that run already go on.

        A key that stays as it was keeps its rate. Tokens are counted by name.

        Args:
            keys: keys with different names; none lets nobody in.
        """
        old = {client.key: client for client in self._clients}
        self._clients = [old.get(key) or Client(key, self._usage) for key in keys]

    def find(self, authorization: str | None) -> Client | None:
        """Return the client that a header belongs to, in the same time for every key; or None."""
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for client in self._clients:
            if hmac.compare_digest(digest, client.key.sha256):
                found = client
        return found if scheme.lower() == "bearer" else None


def unlimited() -> Client:
    """Return the client of a server without keys."""
    return Client(Key("anyone", "0" * 64), None)


def read_usage(ledger: str | os.PathLike[str]) -> dict[str, int]:
    """Return the tokens that each key has used; a server may write the ledger meanwhile.

    Raises:
        LedgerError: as `Usage`.
    """
    return looked_up(ledger, lambda found: dict(found.execute("SELECT name, tokens FROM used")))
