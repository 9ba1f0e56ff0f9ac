"""The file of a server's keys: a hash of each, and what it may ask for."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from adapmixed.files import sole_writer, write_file
from adapmixed.limits import check_optional_queries

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
        if name in {one.name for one in keys}:
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
    written = [{k: v for k, v in asdict(one).items() if v is not None} for one in keys]
    text = json.dumps({"format_version": FORMAT_VERSION, "keys": written}, indent=2) + "\n"
    write_file(path, text.encode("ascii"), mode=0o600)
