"""Tell the kind and the split of local files, and read their text and the rows of tables."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from adapmixed.data.builtin import Document

KINDS = {
    ".txt": "text", ".tokens": "text", ".jsonl": "json", ".jsonlines": "json", ".ndjson": "json",
    ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip
# As plain text, all rows of a table would be one document, although they belong to many people.
_REFUSED = set(
    ".tsv .tab .xls .xlsx .xlsm .xlsb .ods .arrow .feather .json .gz .bz2 .xz .zst .lz4 .lzma .zip "
    ".7z .rar .tar .tgz .tbz2 .txz".split()
)

# The words by which names of files and folders tell the split, as in the library `datasets`.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
csv.field_size_limit((1 << 31) - 1)  # of the whole process; a text may be longer than 128 KiB

Row = tuple[str, Mapping[str, Any]]
"""The row's place, as a phrase for errors, and its columns."""


def kind_of(file: Path) -> str | None:
    """Return the file's kind, a value of `KINDS`, or None for any other suffix."""
    return KINDS.get(file.suffix.lower())


def check_kind(name: str, file: Path, *, rows: bool = True) -> None:
    """Raise ValueError for a file of a kind that is known not to be read.

    Args:
        name: the argument's name, for the message.
        file: the file; an unknown suffix passes as text.
        rows: whether files of rows are read, too.
    """
    if file.suffix.lower() in _REFUSED or (not rows and kind_of(file) not in (None, "text")):
        tables = " or rows of CSV, JSON lines (*.jsonl) or Parquet" if rows else ""
        raise ValueError(f"{name} must hold unpacked text{tables}, got {file}")


def files_below(name: str, folder: Path, split: str | None) -> dict[str, list[Path]]:
    """Return the files below a folder by kind, sorted, without files of other suffixes.

    Args:
        name: the argument's name, for the message.
        folder: the folder.
        split: the only split whose files are returned, or "all"; None if there must be one at most.

    Raises:
        ValueError: if there are tables or archives, which must not be left out silently, or a file
            has two names there: its text would be two documents, which may be in two shards.
        ValueError: if there are several splits, and `split` names none of them.
    """
    found: dict[str, list[Path]] = {}
    names: dict[tuple[int, int], Path] = {}
    splits: set[str] = set()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        kind, own = kind_of(file), _splits_of(file.relative_to(folder))
        if kind not in (None, "text"):
            own = own or {"unnamed"}  # rows beside test.jsonl are hardly meant to be read with it
        if kind is not None:
            splits |= own
        if split not in (None, "all", *own):
            continue
        if kind is not None:
            status = file.stat()
            other = names.setdefault((status.st_dev, status.st_ino), file)
            if other is not file:
                raise ValueError(f"{name} must hold each file once, but {other} and {file} are one")
            found.setdefault(kind, []).append(file)
        elif file.suffix.lower() != ".json":  # data sets describe themselves in such files
            check_kind(name, file)
    listed = ", ".join(sorted(splits))
    if split is None and len(splits) > 1:
        raise ValueError(
            f"{name} must hold one split, but {folder} holds {listed}: name a file or folder in "
            "it, or for a corpus the split (--split), which may be all"
        )
    if split not in (None, "all", *splits):
        raise ValueError(f"split must be all or one of {listed or 'none'} in {folder}, got {split}")
    return found


def _splits_of(path: Path) -> set[str]:
    """Return the splits that a file's folders name; else those that its own name does."""
    parts = [re.sub(r"(?<=[a-z])(?=[A-Z])", " ", part).lower() for part in path.parts]
    *folders, name = [set(re.split(r"[\W\d_]+", part)) for part in parts]
    for words in (set().union(*folders), name):
        if found := {split for split, known in _SPLITS.items() if known & words}:
            return found
    return set()


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
        check_kind(name, root, rows=False)
        files = [root]
    else:
        files = files_below(name, root, None).get("text", [])
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


def text_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text file without a byte-order mark; ValueError if it is not UTF-8."""
    with open(file, encoding="utf-8-sig") as lines:
        try:
            for number, line in enumerate(lines):
                if number < 2 and "\0" in line:  # UTF-16 without a mark
                    raise UnicodeError("bytes of 0")
                yield line
        except UnicodeError as error:
            raise ValueError(
                f"{file} must be UTF-8 text (iconv -f UTF-16 -t UTF-8 converts UTF-16), got {error}"
            ) from error


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
    lines = text_lines(file)
    if new_document is None:
        parts = groupby(lines, key=lambda line: bool(line.strip()))
        texts: Iterator[str] = ("".join(part) for _, part in parts)
    else:
        texts = joined(lines, new_document)
    for number, text in enumerate(text for text in texts if text.strip()):
        yield Document(f"{file.name}#{number}", text.strip("\n"))


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


def json_rows(file: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines, without blank lines.

    Raises:
        ValueError: if a line is no JSON object, or one with a name twice; the message names it.
    """
    for number, line in enumerate(text_lines(file), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} must be a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be a JSON object, got {type(row).__name__}")
        yield where, row


def csv_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns.

    Raises:
        ValueError: if a row has more or fewer columns, or a column occurs twice.
    """
    reader = csv.DictReader(text_lines(file), strict=True)
    try:
        names = reader.fieldnames or ()
        for name in names:
            check_column(str(file), name, names)
        for row in reader:
            where = f"{file}, line {reader.line_num}"
            if None in row or None in row.values():
                got = "more" if None in row else "fewer"
                raise ValueError(f"{where} must have {len(names)} columns, got {got}")
            yield where, row
    except csv.Error as error:
        raise ValueError(f"{file} must be a CSV file: {error}") from error


def parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a Parquet file, read batch by batch and only in `columns`.

    Raises:
        ValueError: if the file is unreadable, lacks a column, or pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_extra("reading Parquet files", "pyarrow", "train", error) from error
    try:
        table = parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} must be a Parquet file: {error}") from error
    with table:
        for column in columns:
            check_column(str(file), column, table.schema_arrow.names)
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=list(columns)):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row


def hub_rows(name: str, config: str | None, revision: str | None, split: str) -> Iterator[Row]:
    """Yield the rows of one split of a data set, streamed through `datasets`.

    Args:
        name: name on the hub, or a local folder that `datasets` can load.
        config: the data set's configuration if it has several, or None.
        revision: commit, tag or branch; None for the newest.
        split: the split, for instance "train".

    Raises:
        ValueError: if the data set cannot be opened, or `datasets` is not installed.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise missing_extra("reading hub data sets", "datasets", "train", error) from error
    try:
        rows = load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:  # for instance no network, or no such name or split
        raise ValueError(f"corpus hub:{name}, split {split!r}, cannot be read: {error}") from error
    for number, row in enumerate(rows):
        yield f"hub:{name}, {split} row {number}", row


def check_column(where: str, column: str, names: Sequence[str]) -> None:
    """Raise ValueError unless there is one such column; the message names those that exist."""
    if column not in names:
        listed = ", ".join(sorted(map(str, names)))
        raise ValueError(f"{where}: column must be one of {listed}, got {column!r}")
    if names.count(column) > 1:
        raise ValueError(f"{where}: columns must differ, got two with the name {column!r}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"names in an object must differ, got {twice!r} twice")
    return found


def missing_extra(what: str, package: str, extra: str, error: ImportError) -> ValueError:
    """Return the error for a missing package that an extra installs."""
    return ValueError(f"{what} needs {package}: pip install 'adapmixed[{extra}]' ({error})")
