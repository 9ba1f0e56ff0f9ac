"""A corpus by author: the change logs of the installed Debian packages, divided into folds.

A document is one signed entry, without its first line and its signature. Documents are divided into
folds of about equal size, in the order of a keyed hash of their text. Authors differ a little
between machines, as their packages do, and so do numbers computed from them. The text is public,
and plays the part of private text.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from adapmixed.data import Document

FOLDER = Path("/usr/share/doc")
KEY = b"adapmixed authors"
LEAST = 4_800
"""Characters of an author who gets a shard, at least."""

_BEGINS = re.compile(r"^\S+ \([^()\s]+\) [^;]+; ", re.MULTILINE)
_SIGNED = re.compile(r"^ -- (.+?) +<[^>]*>  .*$", re.MULTILINE)


@dataclass
class Author:
    """The text of one author.

    Attributes:
        name: the author's name.
        documents: the documents, in the order of a keyed hash of their text.
    """

    name: str
    documents: list[Document] = field(default_factory=list)

    def size(self) -> int:
        """Return the characters of text."""
        return sum(len(document.text) for document in self.documents)

    def folds(self, count: int) -> list[list[Document]]:
        """Divide the documents; each goes to the fold that has the least text so far."""
        found: list[list[Document]] = [[] for _ in range(count)]
        for document in self.documents:
            min(found, key=lambda fold: sum(len(one.text) for one in fold)).append(document)
        return found


def authors(most: int, folder: Path = FOLDER) -> list[Author]:
    """Return all authors who have text, in the order of a keyed hash of their names.

    A text that several change logs have is kept once. One that is too long for the rest of its
    author's characters is cut at the end of a line.

    Args:
        most: the characters that are kept of one author.
        folder: has a folder for each package.
    """
    found: dict[str, Author] = {}
    seen: set[str] = set()
    for path in sorted(folder.glob("*/changelog.Debian.gz")):
        for name, text in _entries(path):
            if text in seen:
                continue
            seen.add(text)
            author = found.setdefault(name, Author(name))
            part = text[: most - author.size()]
            if part != text:
                part = part.rpartition("\n")[0]
            if part:
                author.documents.append(Document(name, part))
    for author in found.values():
        author.documents.sort(key=lambda document: _hash(document.text))
    return sorted(
        (author for author in found.values() if author.documents),
        key=lambda author: _hash(author.name),
    )


def divide(found: list[Author], count: int) -> tuple[list[Author], list[Author]]:
    """Return (the first `count` authors with enough text, all others).

    Raises:
        ValueError: if there are fewer authors with enough text.
    """
    chosen = [author for author in found if author.size() >= LEAST][:count]
    if len(chosen) < count:
        raise ValueError(
            f"{count} authors must have {LEAST} characters in the change logs below "
            f"/usr/share/doc, got {len(chosen)}: Debian and Ubuntu have these files with most "
            "packages"
        )
    return chosen, [author for author in found if author not in chosen]


def _entries(path: Path) -> Iterator[tuple[str, str]]:
    """Yield author and text of every entry of one change log."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            log = file.read()
    except (OSError, EOFError):
        return  # a dangling link, or no gzip file
    starts = [match.start() for match in _BEGINS.finditer(log)]
    for start, stop in zip(starts, [*starts[1:], len(log)], strict=True):
        entry = log[start:stop]
        signed = _SIGNED.search(entry)
        if signed is None:
            continue
        text = "\n".join(line.strip() for line in entry[: signed.start()].split("\n")[1:])
        text = re.sub(r"\n{2,}", "\n", text).strip()
        if text:
            yield signed[1].strip().strip('"'), text


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, key=KEY).digest(), "big")
