"""The journal of a synthesis: which batches are spent, and the tokens that were drawn from them.

It is a file of JSON lines. Its first line holds the settings. Then each batch has a line before its
first token is drawn, one for each token, and one at its end. Every line is on the device before the
next token is drawn. So after a kill the same text goes on: no batch is spent unseen, and a token
that was drawn without its line was seen by nobody.
"""

from __future__ import annotations

import errno
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
        path: of the file, which is continued if it is there; None to keep it in memory alone.
        settings: JSON values that must be those of the file, once a batch is spent.

    Attributes:
        tokens: the tokens that were drawn, by batch.
        ended: the batches whose text is complete.

    Raises:
        ValueError: the file has other settings or another format, or it is damaged.
        BlockingIOError: another process writes it.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self._stack, self._file, self._process = ExitStack(), None, os.getpid()
        if path is None:
            return
        try:
            self._stack.enter_context(sole_writer(path))
            create_file(path, b"")
            first = {"format_version": FORMAT_VERSION, **settings}
            kept = self._read(path, json.loads(_line(first)))
            self._file = self._stack.enter_context(open(path, "r+b", buffering=0))
            self._file.truncate(kept)  # a last line that was cut short
            self._file.seek(kept)
            if kept == 0:
                self._append(first)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path, expected: Any) -> int:
        """Take in what was written; return the bytes to keep, 0 if no batch is spent yet."""
        content = path.read_bytes()
        kept = content.rfind(b"\n") + 1
        try:
            first, *lines = [json.loads(line) for line in content[:kept].splitlines()] or [{}]
            differ = [name for name, value in expected.items() if first.get(name) != value]
            for entry in lines:
                batch = entry["batch"]
                if "token" in entry:
                    self.tokens[batch].append(entry["token"])
                elif "ended" in entry:
                    self.ended.add(batch)
                else:
                    self.tokens[batch] = []
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} must be an intact journal: {error!r}") from error
        if lines and differ:
            raise ValueError(
                f"{path} must have been begun with the same settings and texts, got others of "
                f"{', '.join(differ)}: give another output"
            )
        return kept if lines else 0

    def begin(self, batch: int) -> None:
        """Note that a batch is spent from now on, unless it is already."""
        if batch not in self.tokens:
            self._append({"batch": batch})
            self.tokens[batch] = []

    def add(self, batch: int, token: int) -> None:
        """Add a token that was drawn from a batch."""
        self._append({"batch": batch, "token": token})
        self.tokens[batch].append(token)

    def end(self, batch: int) -> None:
        """Note that the text of a batch is complete."""
        self._append({"batch": batch, "ended": True})
        self.ended.add(batch)

    def _append(self, entry: Mapping[str, Any]) -> None:
        if os.getpid() != self._process:  # parent and child of a fork would each draw a text
            raise ValueError("a synthesis must be used in the process that made it, got a fork")
        if self._file is not None:
            line = _line(entry)
            try:
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
            except OSError as error:
                error.filename = self._file.name
                raise

    def close(self) -> None:
        """Let another process write the file."""
        if os.getpid() == self._process:  # a forked child must not, as its parent holds it
            self._stack.close()


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, ensure_ascii=False).encode() + b"\n"
