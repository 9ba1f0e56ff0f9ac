"""Private text by author: the change logs of the installed Debian packages.

Every entry is signed. The author names the document, so a shard's guarantee is about authors.
Entries differ from machine to machine, and so do numbers computed from them. The text is public,
and plays the part of private text in studies.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from adapmixed.data.builtin import Document

FOLDER = Path("/usr/share/doc")

_BEGINS = re.compile(r"^\S+ \([^()\s]+\) [^;]+; ", re.MULTILINE)
_SIGNED = re.compile(r"^ -- (.+?) +<[^>]*>  .*$", re.MULTILINE)


def changelog_documents(folder: Path = FOLDER, most: int = 3_000) -> list[Document]:
    """Return the entries of all change logs below a folder, by author, every text once.

    A document is the text of an entry, without its first line and its signature. The author's name
    is the identifier. Entries are kept in the order of the files' names. One that is too long for
    the rest of its author's characters is cut at the end of a line.

    Args:
        folder: has a folder for each package.
        most: characters kept of each author; few, so that no shard is one person's text.

    Returns:
        documents sorted by author; none if there are no change logs.
    """
    kept: dict[str, list[str]] = {}
    left: dict[str, int] = {}
    seen: set[str] = set()
    for path in sorted(folder.glob("*/changelog.Debian.gz")):
        for author, text in _entries(path):
            if text in seen:
                continue
            seen.add(text)
            part = text[: left.setdefault(author, most)]
            if part != text:
                part = part.rpartition("\n")[0]
            if part:
                kept.setdefault(author, []).append(part)
                left[author] -= len(part)
    return [Document(author, text) for author in sorted(kept) for text in kept[author]]


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
