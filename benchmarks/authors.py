"""A corpus by author: the change logs of the installed Debian packages, divided into folds.

A document is one signed entry. Documents are divided into folds of about equal size, in the order
of a keyed hash of their text. Authors differ a little between machines, as their packages do, and
so do numbers computed from them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from adapmixed.data import Document
from adapmixed_lab.reproduce.kinds.changelogs import changelog_documents

KEY = b"adapmixed authors"
LEAST = 4_800
"""Characters of an author who gets a shard, at least."""


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


def authors(most: int) -> list[Author]:
    """Return all authors who have text, in the order of a keyed hash of their names.

    Args:
        most: the characters that are read of one author.
    """
    found: dict[str, Author] = {}
    for document in changelog_documents(most=most):
        name = document.identifier
        found.setdefault(name, Author(name)).documents.append(document)
    for author in found.values():
        author.documents.sort(key=lambda document: _hash(document.text))
    return sorted(found.values(), key=lambda author: _hash(author.name))


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


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, key=KEY).digest(), "big")
