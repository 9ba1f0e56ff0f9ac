"""Read local UTF-8 text: files as documents, or the articles of one file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from io import BufferedReader, TextIOWrapper
from itertools import groupby
from pathlib import Path

from adapmixed.data.builtin import Document
from adapmixed.data.kinds import check_kind, files_below


def read_text(path: str | os.PathLike[str], *, name: str = "path") -> list[Document]:
    """Read a UTF-8 text file as one document, or every `*.txt` file below a folder.

    Args:
        path: the file or the folder.
        name: how errors call `path`, such as the option of a command.

    Returns:
        documents sorted by identifier, without files that hold no text. The identifier is the path
        relative to `path`, or the file's own name for a single file.

    Raises:
        ValueError: if `path` does not exist, is not UTF-8, holds no text, or holds rows
            (`*.jsonl`, `*.tsv` ...), or if a folder holds several splits.
    """
    root = Path(path)
    if not root.exists():
        raise ValueError(
            f"{name} must name a text file or a directory of *.txt files, got {str(root)!r}"
        )
    if root.is_file():
        check_kind(name, root, "text")
        files = [root]
    else:
        files = files_below(name, root, "name one of its files or folders", None).get("text", [])
    documents = list(file_documents(root, files))
    if not documents:
        raise ValueError(f"{name} must hold text, but {root} has none (*.txt files are read)")
    return documents


def file_documents(root: Path, files: Iterable[Path]) -> Iterator[Document]:
    """Yield each file as one document, named by its path below `root`, without blank files.

    Raises:
        ValueError: if a file is not UTF-8.
    """
    for file in files:
        text = "".join(text_lines(file))
        if text.strip():
            yield Document(relative_name(root, file), text)


def open_utf8(file: Path) -> BufferedReader:
    """Open a file of UTF-8 text to read its bytes; raise ValueError for UTF-16."""
    opened = open(file, "rb")
    first = opened.peek(64)[:64]  # without a mark, a blank among so many has a byte of 0
    if first[:2] in (b"\xff\xfe", b"\xfe\xff") or 0 in first:
        opened.close()
        raise ValueError(
            f"{file} must be UTF-8 text, got UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
        )
    return opened


def text_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file without a byte-order mark; ValueError if it is not UTF-8."""
    with TextIOWrapper(open_utf8(file), encoding="utf-8-sig") as lines:
        try:
            yield from lines
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be UTF-8 text: {error}") from error


def relative_name(root: Path, file: Path) -> str:
    """Return the file's path below `root`, or its own name if it is `root`."""
    return file.name if file == root else file.relative_to(root).as_posix()


def article_documents(file: Path, new_document: str | None) -> Iterator[Document]:
    """Yield the articles of one file, named by their position: `name#0`, `name#1` ...

    Articles without text are neither yielded nor counted. So an edit that begins, joins or empties
    an article renames all later ones.

    Args:
        file: a UTF-8 text file, read line by line.
        new_document: a regular expression; a line that it matches begins an article. None if blank
            lines separate articles.

    Raises:
        ValueError: if the file is not UTF-8.
    """
    for number, text in enumerate(_articles(text_lines(file), new_document)):
        yield Document(f"{file.name}#{number}", text)


def joined(texts: Iterable[str], new_document: str) -> Iterator[str]:
    """Yield documents of joined texts; a text that the expression matches begins a document."""
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
    """Yield the articles that hold text."""
    found: Iterator[str]
    if new_document is None:
        found = ("".join(part) for _, part in groupby(lines, key=lambda line: bool(line.strip())))
    else:
        found = joined(lines, new_document)
    return (text.strip("\n") for text in found if text.strip())
