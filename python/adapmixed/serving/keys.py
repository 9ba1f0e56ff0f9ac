"""The keys of a server's clients: a file of hashes, and what each key may ask for."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from adapmixed.checks import check_count, check_optional_count
from adapmixed.files import sole_writer, write_file
from adapmixed.serving.errors import key_spent, too_fast
from adapmixed.serving.usage import Usage

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_LIMITS = ("max_tokens", "tokens", "requests_per_minute")


@dataclass(frozen=True)
class Key:
    """A key in the file.

    Attributes:
        name: the client's name, which its used tokens are counted for.
        sha256: SHA-256 of the key, in hexadecimal digits.
        max_tokens: largest max_tokens of a request; None for the server's.
        tokens: largest number of tokens that all answers may have together; None for all.
        requests_per_minute: largest number of requests in a minute; None for any.
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
        for limit in _LIMITS:
            check_optional_count(f"{limit} of {self.name}", getattr(self, limit))


def read_keys(path: str | os.PathLike[str]) -> list[Key]:
    """Return the keys of a file.

    Raises:
        ValueError: the file is no file of keys, or two keys have the same name or hash.
        OSError: it cannot be read.
    """
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
        if whole.keys() != {"format", "keys"} or whole["format"] != FORMAT:
            raise ValueError(f'it must be {{"format": {FORMAT}, "keys": [...]}}')
        keys = [Key(**one) for one in whole["keys"]]
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
        limits: max_tokens, tokens and requests_per_minute; None for no limit.

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
        if name in {one.name for one in keys}:
            raise ValueError(f"NAME must be new, but {path} has a key with the name {name}")
        written = [{k: v for k, v in asdict(one).items() if v is not None} for one in [*keys, key]]
        text = json.dumps({"format": FORMAT, "keys": written}, indent=2) + "\n"
        write_file(path, text.encode("ascii"), mode=0o600)
    return secret


class Client:
    """A key in use: its tokens and its rate. Any thread may call every method.

    Args:
        key: the key.
        usage: the tokens that all keys have used; None if this key has no limit of tokens.
    """

    def __init__(self, key: Key, usage: Usage | None) -> None:
        self.key, self._usage = key, usage
        self._lock = threading.Lock()
        self._level, self._filled = float(key.requests_per_minute or 0), time.monotonic()

    def check_rate(self) -> None:
        """Count a request.

        Raises:
            RequestError: 429: too many requests came in the last minute. This one is not counted.
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

    def admit(self, tokens: int) -> Grant:
        """Count the tokens of a request, durably, before its answer starts.

        Args:
            tokens: largest number of tokens of all its answers.

        Raises:
            RequestError: 429: the key has fewer tokens left. None are counted.
            OSError: they could not be counted durably.
        """
        if self.key.tokens is None or self._usage is None:
            return Grant(None, None, "", tokens)
        name, limit = self.key.name, self.key.tokens
        admission = self._usage.admit(name, tokens, limit)
        if admission is None:
            raise key_spent(max(0, limit - self._usage.used(name)))
        return Grant(self._usage, admission, name, tokens)


class Grant:
    """Tokens that a key has been counted for one request."""

    def __init__(self, usage: Usage | None, admission: int | None, name: str, tokens: int) -> None:
        self._usage, self._admission, self._name, self._tokens = usage, admission, name, tokens

    def end(self, used: int) -> None:
        """Give back what the answers did not use. Further calls do nothing.

        Raises:
            OSError: as `Usage.give_back`.
        """
        usage, self._usage = self._usage, None
        if usage is not None and self._admission is not None:
            usage.give_back(self._admission, self._name, self._tokens - min(used, self._tokens))


class Clients:
    """The keys of a server, found by what a client sends.

    Args:
        keys: keys with different names.
        usage: the tokens that keys have used; None if no key has a limit of tokens.
    """

    def __init__(self, keys: Sequence[Key], usage: Usage | None) -> None:
        if usage is None and any(key.tokens is not None for key in keys):
            raise ValueError("usage must be given for keys with a limit of tokens, got None")
        check_count("number of keys", len(keys))
        self._clients = [Client(key, usage) for key in keys]

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
