"""The journal of a synthesis: which batches are spent, and the tokens that were drawn from them.

It is a file of JSON lines. Its first line holds the settings. Then each batch has a line before its
first token is drawn, one for each token, and one at its end. Every line is on the device before the
next token is drawn. So after a kill the same text goes on: no batch is spent unseen, and a token
that was drawn without its line was seen by nobody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from adapmixed.files import create_file, sole_writer

FORMAT_VERSION = 1


class Journal:
    """The one writer of a journal.

    Args:
        path: of the file, which is continued if it is there.
        settings: JSON values that must be those of the file.

    Attributes:
        tokens: the tokens that were drawn, by batch.
        ended: the batches whose text is complete.

    Raises:
        ValueError: the file has other settings or another format, or it is damaged.
        BlockingIOError: another process writes it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self._stack = ExitStack()
        try:
            self._stack.enter_context(sole_writer(path))
            first = {"format_version": FORMAT_VERSION, "settings": dict(settings)}
            create_file(path, _line(first))
            kept = self._read(json.loads(_line(first)))
            self._file = self._stack.enter_context(open(path, "r+b", buffering=0))
            self._file.truncate(kept)  # a last line that was cut short
            self._file.seek(kept)
        except BaseException:
            self.close()
            raise

    def _read(self, expected: Any) -> int:
        """Take in what was written; return the bytes of whole lines."""
        content = self.path.read_bytes()
        kept = content.rfind(b"\n") + 1
        try:
            first, *lines = [json.loads(line) for line in content[:kept].splitlines()]
            for entry in lines:
                batch = entry["batch"]
                if "token" in entry:
                    self.tokens[batch].append(entry["token"])
                elif "ended" in entry:
                    self.ended.add(batch)
                else:
                    self.tokens[batch] = []
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path} must be an intact journal: {error!r}") from error
        if first != expected:
            wanted, there = (json.dumps(one, ensure_ascii=False) for one in (expected, first))
            raise ValueError(
                f"{self.path} must have been begun with the same settings and texts, {wanted}, got "
                f"{there}: give another output"
            )
        return kept

    def begin(self, batch: int) -> list[int]:
        """Return the tokens of a batch so far; a new batch is spent from now on."""
        if batch not in self.tokens:
            self._append({"batch": batch})
            self.tokens[batch] = []
        return self.tokens[batch]

    def add(self, batch: int, token: int) -> None:
        """Add a token that was drawn from a batch."""
        self._append({"batch": batch, "token": token})
        self.tokens[batch].append(token)

    def end(self, batch: int) -> None:
        """Note that the text of a batch is complete."""
        self._append({"batch": batch, "ended": True})
        self.ended.add(batch)

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(_line(entry))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let another process write the file."""
        self._stack.close()


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"
