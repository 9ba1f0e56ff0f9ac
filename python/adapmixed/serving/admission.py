"""Who may ask for how many tokens: keys, their file and rates, and what is reserved.

The file holds a hash of each key. It is apart from the ledger, which the server has for itself,
since keys come and go while it runs. The tokens that each has used are a table of the ledger's
database. Admissions are on the device before their answers start, and what an answer gives back is
written later. So a process that is killed loses a key at most tokens of its own. An answer's tokens
of the plan are reserved in memory before it starts, so that it does not end for want of budget.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from adapmixed.files import sole_writer, write_file
from adapmixed.limits import check_optional_queries
from adapmixed.privacy import Accountant
from adapmixed.privacy.ledger import WRITING, connected, translated
from adapmixed.serving.errors import NO_RETRY, RequestError, loggable

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism

_LOG = logging.getLogger(__name__)
FORMAT_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
LIMITS = ("max_tokens", "tokens", "requests_per_minute")
"""The limits that a key may have."""


@dataclass(frozen=True)
class Key:
    """A key in the file.

    Attributes:
        name: the client's name, which its used tokens are counted for.
        sha256: SHA-256 of the key, in hexadecimal digits.
        max_tokens: largest max_tokens of a request; None for the server's.
        tokens: largest number of tokens that all answers may have together; None for all.
        requests_per_minute: largest number of requests at once, and of further ones in each minute;
            None for any.
    """

    name: str
    sha256: str
    max_tokens: int | None = None
    tokens: int | None = None
    requests_per_minute: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                "name must be 1 to 64 letters, digits, '.', '_' or '-', and begin with a letter or "
                f"digit, got {self.name!r}"
            )
        if not isinstance(self.sha256, str) or not _HASH.fullmatch(self.sha256):
            raise ValueError(f"sha256 of {self.name} must be 64 hexadecimal digits")
        for limit in LIMITS:
            check_optional_queries(getattr(self, limit), f"{limit} of {self.name}")


ANYONE = Key("anyone", "0" * 64)
"""Who sends the requests of a server without keys."""


def read_keys(path: str | os.PathLike[str]) -> list[Key]:
    """Return the keys of a file.

    Raises:
        ValueError: the file is no file of keys, or two keys have the same name or hash.
        OSError: it cannot be read.
    """
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
        if whole.keys() != {"format_version", "keys"} or whole["format_version"] != FORMAT_VERSION:
            raise ValueError(f'it must be {{"format_version": {FORMAT_VERSION}, "keys": [...]}}')
        keys = [Key(**entry) for entry in whole["keys"]]
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a file of keys: {error}") from error
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) < len(keys):
            raise ValueError(f"{path} must not hold two keys with the same {field}")
    return keys


def add_key(path: str | os.PathLike[str], name: str, **limits: int | None) -> str:
    """Add a key to a file, which is made if it is not there.

    Args:
        path: the file. It is replaced in one step, and its owner alone may read it.
        name: name of the new key.
        limits: of `LIMITS`; None for no limit.

    Returns:
        The key. It is in no file, so it cannot be shown again.

    Raises:
        ValueError: the name is taken or not valid, a limit is, or the file is no file of keys.
        OSError: the file cannot be read or written, or another process is writing it.
    """
    secret = f"adapmixed-{secrets.token_urlsafe(32)}"
    key = Key(name, hashlib.sha256(secret.encode("ascii")).hexdigest(), **limits)
    with sole_writer(path):
        keys = read_keys(path) if Path(path).exists() else []
        if name in {other.name for other in keys}:
            raise ValueError(f"NAME must be new, but {path} has a key with the name {name}")
        _write(path, [*keys, key])
    return secret


def remove_key(path: str | os.PathLike[str], name: str) -> None:
    """Remove a key from a file.

    Args:
        path: the file. It is replaced in one step.
        name: name of the key.

    Raises:
        ValueError: the file has no such key, or it is no file of keys.
        OSError: the file cannot be read or written, or another process is writing it.
    """
    with sole_writer(path):
        keys = read_keys(path)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise ValueError(f"NAME must be that of a key in {path}, got {name!r}")
        _write(path, left)


def _write(path: str | os.PathLike[str], keys: Sequence[Key]) -> None:
    written = [{k: v for k, v in asdict(key).items() if v is not None} for key in keys]
    text = json.dumps({"format_version": FORMAT_VERSION, "keys": written}, indent=2) + "\n"
    write_file(path, text.encode("ascii"), mode=0o600)


class Clients:
    """The keys of a server in use, their rates, and the tokens that they have used.

    Any thread may call every method, but one at a time `find` and `check_rate`. Those that count
    tokens raise LedgerError if the database is damaged, or cannot be read or written.

    Args:
        file: the file of keys.
        ledger: path of the ledger whose database counts used tokens by the name of a key.

    Raises:
        ValueError, OSError: as `read_keys`.
    """

    def __init__(self, file: str | os.PathLike[str], ledger: str | os.PathLike[str]) -> None:
        self._keys, self._file, self._path = read_keys(file), file, os.path.realpath(ledger)
        self._seen: tuple[int, ...] | None = None  # what differs if the file has changed
        self._rates: dict[Key, tuple[float, float]] = {}  # requests left, and when
        with translated(self._path):
            self._database = connected(self._path)

    def find(self, authorization: str | None) -> Key | None:
        """Return the key that a header belongs to, in the same time for every key; or None.

        The file is read again once it has changed. If it is bad then, the old keys stay. Answers
        that run go on, and a key that stays as it was keeps its rate.
        """
        try:
            stat = os.stat(self._file)
            state = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if state != self._seen:
                self._keys, self._seen = read_keys(self._file), state
        except (ValueError, OSError) as error:
            _LOG.error("the old keys stay: %s", error)
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode("utf-8", "surrogateescape")).hexdigest()
        owner = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.sha256):
                owner = key
        return owner if scheme.lower() == "bearer" else None

    def check_rate(self, key: Key) -> None:
        """Count a request.

        A key that has been idle for a minute may send as many requests at once as its limit says,
        and as many again, evenly, in each minute after. So at most twice as many pass in a minute.

        Raises:
            RequestError: 429: more requests came than that. This one is not counted.
        """
        most = key.requests_per_minute
        if most is None:
            return
        now = time.monotonic()
        left, since = self._rates.get(key, (float(most), now))
        left = min(most, left + (now - since) * most / 60.0)
        self._rates[key] = (left if left < 1 else left - 1), now
        if left < 1:
            seconds = max(1, math.ceil((1 - left) * 60.0 / most))
            message = f"this key may make {most} requests per minute"
            headers = {"retry-after": str(seconds)}
            raise RequestError(429, message, "rate_limit_exceeded", headers=headers)

    def admit(self, key: Key, tokens: int) -> None:
        """Count the tokens of a request, durably, before its answer starts.

        Args:
            key: the key that asks.
            tokens: largest number of tokens of all its answers.

        Raises:
            RequestError: 429: the key has fewer tokens left. None are counted.
        """
        look = "SELECT tokens FROM used WHERE name = ?"
        add = "INSERT INTO used VALUES (?1, ?2) ON CONFLICT DO UPDATE SET tokens = tokens + ?2"
        with WRITING, translated(self._path):  # no other process writes them
            (used,) = self._database.execute(look, (key.name,)).fetchone() or (0,)
            if key.tokens is not None and used + tokens > key.tokens:
                left = max(0, key.tokens - used)
                message = "this key does not pay for max_tokens of every prompt: it has"
                message += f" {left} tokens left"
                raise RequestError(429, message, "insufficient_quota", headers=NO_RETRY)
            self._database.execute(add, (key.name, tokens))

    def give_back(self, name: str, tokens: int) -> None:
        """Count tokens of an admission as unused, for the key with a name."""
        take = "UPDATE used SET tokens = max(0, tokens - ?) WHERE name = ?"
        with WRITING, translated(self._path):
            self._database.execute(take, (tokens, name))

    def close(self) -> None:
        """Close the database. To close twice is allowed."""
        self._database.close()


class Admission:
    """The tokens of the plan, reserved in memory, and those of keys, counted durably.

    What was charged before is read from the accountant, so a restart begins with the ledger's count
    and no reservations. From then on each charged token moves from the reserved ones to the spent
    ones in one step. So none counts twice. Any thread may call every method, but one at a time
    `reserve`.

    Args:
        accountant: charged by the engine alone, and bound to the mechanism.
        mechanism: how queries are answered.
        clients: the keys; None if callers of this machine need none.

    Attributes:
        clients: as given.
        reserved: number of tokens of the plan that are reserved and not yet charged.
    """

    def __init__(
        self, accountant: Accountant, mechanism: Mechanism, clients: Clients | None = None
    ) -> None:
        self._accountant, self._mechanism, self.clients = accountant, mechanism, clients
        self._lock = threading.Lock()
        self.reserved = 0
        self._spent = accountant.planned

    def reserve(self, tokens: int, key: Key = ANYONE) -> None:
        """Reserve tokens of the plan, and count them for a key, until each is charged or freed.

        Args:
            tokens: largest number of tokens of all answers to one query.
            key: the key that asks.

        Raises:
            BudgetSpentError: fewer are left of the plan. Nothing is reserved.
            RequestError: 503: others have reserved what is left; 429: the key asks too often, or
                has fewer left. Nothing is reserved.
            LedgerError: the key's tokens could not be counted durably. Nothing is reserved.
        """
        with self._lock:
            if self.clients is not None:
                self.clients.check_rate(key)
            # Public answers cost nothing; a step may be charged before its tokens are freed.
            charged = self._accountant.planned
            self._spent = min(self._spent, charged) if self.reserved else charged
            self._accountant.check_left(self._mechanism, tokens, self._spent)
            planned = self._mechanism.planned_queries
            if planned is not None and self._spent + self.reserved + tokens > planned:
                message = "running answers have reserved what is left; try later, or ask for less"
                raise RequestError(503, message, "reserved", headers={"retry-after": "5"})
        if self.clients is not None:
            self.clients.admit(key, tokens)
        with self._lock:
            self.reserved += tokens

    def charged(self) -> None:
        """Count a token as spent, no longer as reserved."""
        with self._lock:
            self.reserved -= 1
            self._spent += 1

    def free(self, tokens: int, client: str) -> None:
        """Free tokens that were reserved for a client and not charged. None is freed twice."""
        with self._lock:
            self.reserved -= tokens
        if self.clients is not None and tokens:
            try:
                self.clients.give_back(client, tokens)
            except Exception as error:  # the key keeps them counted
                _LOG.error("tokens of a key could not be given back: %s", loggable(error))

    @property
    def left(self) -> int | None:
        """Number of tokens of the plan that are neither charged nor reserved; None without one."""
        with self._lock:
            return None if (left := self.unspent) is None else left - self.reserved

    @property
    def unspent(self) -> int | None:
        """Number of tokens of the plan that are not charged; None without a plan."""
        planned = self._mechanism.planned_queries
        return None if planned is None else max(0, planned - self._spent)
