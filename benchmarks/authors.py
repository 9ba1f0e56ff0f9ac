"""A corpus by author: the docstrings of installed Python distributions.

An author is one installed distribution, for instance `networkx`. A document is what one file says
about one of its functions or classes, with all methods, or about the module itself. Documents are
divided into folds of about equal size, in the order of a keyed hash of their names. Authors differ
a little between machines, as their versions do, and so do numbers computed from them.
"""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import PurePath

from adapmixed.data import Document

KEY = b"adapmixed authors"
LEAST = 8_000
"""Characters of an author who gets a shard, at least."""

_LONGEST = 4_000  # characters of a document
_SHORTEST = 40
_SKIPPED = {"test", "tests", "testing", "_vendor", "vendor", "conftest.py"}


@dataclass
class Author:
    """The text of one author.

    Attributes:
        name: the distribution's name.
        documents: the documents, in the order of a keyed hash of their names.
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

    A repeated document is kept once.

    Args:
        most: the characters of one author after which no more files are read.
    """
    found = {}
    for one in metadata.distributions():
        name = (one.metadata["Name"] or "").lower().replace("_", "-")
        if name and name != "adapmixed" and name not in found:
            found[name] = _read(name, one, most)
    ordered = sorted(found.values(), key=lambda author: _hash(author.name))
    seen: set[str] = set()
    for author in ordered:
        author.documents = _new(author.documents, seen)
    return [author for author in ordered if author.documents]


def divide(found: list[Author], count: int) -> tuple[list[Author], list[Author]]:
    """Return (the first `count` authors with enough text, all others).

    Raises:
        ValueError: if there are fewer authors with enough text.
    """
    chosen = [author for author in found if author.size() >= LEAST][:count]
    if len(chosen) < count:
        raise ValueError(
            f"{count} installed distributions must have {LEAST} characters of docstrings, got "
            f"{len(chosen)}: install the extras, with constraints.txt"
        )
    return chosen, [author for author in found if author not in chosen]


def documents(source: str, place: str) -> Iterator[Document]:
    """Yield the documents of a Python file; none if it cannot be parsed.

    Args:
        source: the file's content.
        place: the file's name, which begins the documents' names.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    parts: dict[str, list[str]] = {"": [ast.get_docstring(tree) or ""]}
    for top in tree.body:
        if isinstance(top, kinds):
            inner = (node for node in ast.walk(top) if isinstance(node, kinds))
            parts.setdefault(top.name, []).extend(ast.get_docstring(one) or "" for one in inner)
    for name, texts in parts.items():
        text = "\n\n".join(filter(None, texts))[:_LONGEST].strip()
        if len(text) >= _SHORTEST:
            yield Document(f"{place}:{name}", text)


def _read(name: str, distribution: metadata.Distribution, most: int) -> Author:
    """Read an author's files in the order of their hashes until enough is found."""
    author = Author(name)
    files = [
        path
        for path in distribution.files or ()
        if path.suffix == ".py" and not _SKIPPED & set(PurePath(path).parts)
    ]
    for path in sorted(files, key=lambda path: _hash(path.as_posix())):
        if author.size() >= most:
            break
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        author.documents += documents(source, path.as_posix())
    author.documents.sort(key=lambda document: _hash(document.identifier))
    return author


def _new(found: list[Document], seen: set[str]) -> list[Document]:
    """Return the documents whose text, up to white space, is not in `seen`, and add it there."""
    kept = []
    for document in found:
        key = re.sub(r"\s+", " ", document.text)
        if key not in seen:
            seen.add(key)
            kept.append(document)
    return kept


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, key=KEY).digest(), "big")
