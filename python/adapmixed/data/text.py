"""Local UTF-8 text: files as documents, or the articles of one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from adapmixed.data.builtin import Document
from adapmixed.data.kinds import check_kind, files_below


def read_text(path: str | os.PathLike[str]) -> list[Document]:
    """Reads a local UTF-8 text file (one document), or every `*.txt` file beneath a directory.

    Returns:
        documents sorted by identifier, which is the path relative to `path` (the file's own name
        for a single file); files without any text are left out.

    Raises:
        ValueError: if `path` does not exist, is not UTF-8, holds no text, or rows (`*.jsonl`,
            `*.csv` ...), which are no running text.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(f"path must name a text file or a directory of *.txt files, got {root}")
    if root.is_file():
        check_kind("path", root, "text")
        files = [root]
    else:
        files = files_below("path", root).get("text", [])
    documents = list(file_documents(root, files))
    if not documents:
        raise ValueError(f"path must hold text, {root} has none (*.txt files are read)")
    return documents


def file_documents(root: Path, files: Iterable[Path]) -> Iterator[Document]:
    """Each file as one document, named by its path below `root`; blank files are left out.

    Raises:
        ValueError: if a file is not UTF-8.
    """
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be UTF-8 text: {error}") from error
        if text.strip():
            yield Document(relative_name(root, file), text)


def relative_name(root: Path, file: Path) -> str:
    """The file's path below `root`, or its own name if it is `root`."""
    return file.name if file == root else file.relative_to(root).as_posix()


def article_documents(file: Path, new_document: str | None) -> Iterator[Document]:
    """Yield the articles of one file, named by their position: `name#0`, `name#1` ...

    Articles without text are left out and not counted. So an edit that begins, joins or empties an
    article renames all later ones.

    Args:
        file: UTF-8 text, read line by line.
        new_document: regular expression; a line that it matches begins an article. None: articles
            are separated by blank lines.

    Raises:
        ValueError: if the file is not UTF-8.
    """
    with open(file, encoding="utf-8") as lines:
        try:
            for number, text in enumerate(_articles(lines, new_document)):
                yield Document(f"{file.name}#{number}", text)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be UTF-8 text: {error}") from error


def joined(texts: Iterable[str], new_document: str) -> Iterator[str]:
    """Texts in order, each that the expression matches being the first of a new document."""
    begins = re.compile(new_document)
    parts: list[str] = []
    for text in texts:
        if begins.match(text) and parts:
            yield "".join(parts)
            parts = []
        parts.append(text if text.endswith("\n") else text + "\n")
    if parts:
        yield "".join(parts)


def _articles(lines: Iterable[str], new_document: str | None) -> Iterator[str]:
    """Articles that hold text, one at a time."""
    found = _paragraphs(lines) if new_document is None else joined(lines, new_document)
    return (text.strip("\n") for text in found if text.strip())


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    parts: list[str] = []
    for line in lines:
        if line.strip():
            parts.append(line)
        elif parts:
            yield "".join(parts)
            parts = []
    if parts:
        yield "".join(parts)
