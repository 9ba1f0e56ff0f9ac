"""The tokens that each key has used, in a file that survives a restart and a power cut.

Admissions are on the disk before their answers start. What an answer gives back is written later,
so a process that is killed loses a key at most tokens of its own. Every line holds a checksum of
all lines up to it. A last line without its end was never relied on, and is dropped.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from pathlib import Path
from typing import Any

from adapmixed.checks import check_count
from adapmixed.files import remove_leftovers, write_file

FORMAT_VERSION = 1


def usage_path(ledger: str | os.PathLike[str]) -> Path:
    """Return the file of used tokens, next to a ledger.

    Args:
        ledger: path of the ledger. Symbolic links to it have the same file of used tokens; hard
            links do not.
    """
    return Path(f"{os.path.realpath(ledger)}.usage")


class Usage:
    """Used tokens by the name of a key. Any thread may call every method.

    The file is rewritten when it is opened, so it does not grow from restart to restart. One
    process alone may open it; the server holds the ledger's lock meanwhile.

    Args:
        path: the file; it is made if it is not there.

    Raises:
        ValueError: the file is damaged.
        OSError: it cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._lock = Path(path), threading.Lock()
        remove_leftovers(self._path.parent, self._path.name)
        self._used = read_usage(self._path) if self._path.exists() else {}
        self._admissions = 0
        line, self._checksum = _line({"format_version": FORMAT_VERSION, "used": self._used}, 0)
        write_file(self._path, line, mode=0o600)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        self._usable = True

    def used(self, name: str) -> int:
        """Return the tokens that a key has used."""
        return self._used.get(name, 0)

    def admit(self, name: str, tokens: int, limit: int | None) -> int | None:
        """Count tokens for a key, durably.

        Args:
            name: name of the key.
            tokens: largest number of tokens of an admission.
            limit: largest number of tokens that the key may use; None for any.

        Returns:
            The number of the admission, for `give_back`; None if the key has too few tokens left.

        Raises:
            OSError: the admission could not be written. Later ones will raise, too.
        """
        with self._lock:
            if limit is not None and self.used(name) + tokens > limit:
                return None
            self._admissions += 1
            self._append({"admission": self._admissions, "key": name, "tokens": tokens})
            self._usable = False  # after an error here, the end of the file is not known
            os.fsync(self._file)
            self._usable = True
            self._used[name] = self.used(name) + tokens
            return self._admissions

    def give_back(self, admission: int, name: str, tokens: int) -> None:
        """Count tokens of an admission as unused. Each admission gives back once.

        Raises:
            OSError: it could not be written, so the key keeps them counted after a restart.
        """
        with self._lock:
            if tokens > 0:
                self._used[name] -= tokens
                self._append({"admission": admission, "returned": tokens})

    def close(self) -> None:
        """Close the file. To close twice is allowed."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file, self._usable = -1, False

    def _append(self, entry: dict[str, Any]) -> None:
        if not self._usable:
            raise OSError(f"{self._path} cannot be written to since an earlier error")
        line, checksum = _line(entry, self._checksum)
        self._usable = False  # a part of the line may be in the file until all of it is
        if os.write(self._file, line) != len(line):
            raise OSError(
                f"{self._path} could not be written, for example because the disk is full"
            )
        self._usable, self._checksum = True, checksum


def _line(entry: dict[str, Any], before: int) -> tuple[bytes, int]:
    text = json.dumps(entry).encode("ascii")
    checksum = zlib.crc32(text, before)
    return b"%08x %s\n" % (checksum, text), checksum


def read_usage(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the tokens that each key has used; a server may write the file meanwhile.

    Raises:
        ValueError: the file is damaged.
        OSError: it cannot be read.
    """
    *lines, _ = Path(path).read_bytes().split(b"\n")
    if not lines:
        raise ValueError(f"{path} must be a file of used tokens, but its first line is damaged")
    used: dict[str, int] = {}
    admitted: dict[int, tuple[str, int]] = {}
    checksum = 0
    for number, line in enumerate(lines, 1):
        try:
            text = line[9:]
            checksum = zlib.crc32(text, checksum)
            if line[:9] != b"%08x " % checksum:
                raise ValueError("the checksum differs")
            _apply(json.loads(text), number, used, admitted)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged in line {number}: {error}") from error
    return used


def _apply(
    entry: dict[str, Any], number: int, used: dict[str, int], admitted: dict[int, tuple[str, int]]
) -> None:
    if number == 1:
        if entry.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"it must begin with format_version {FORMAT_VERSION}")
        used.update((name, check_count(name, count, 0)) for name, count in entry["used"].items())
    elif "key" in entry:
        name, tokens = entry["key"], check_count("tokens", entry["tokens"])
        admitted[entry["admission"]] = (name, tokens)
        used[name] = used.get(name, 0) + tokens
    else:
        name, tokens = admitted.pop(entry["admission"])
        returned = check_count("returned", entry["returned"])
        if returned > tokens:
            raise ValueError(f"returned must be <= {tokens}, got {returned}")
        used[name] -= returned
