"""Read a corpus as a stream of documents with their identifiers.

docs/how-to/train.md says what is a document, and what its name, for every source. Documents that
share an identifier stay in one shard, and a guarantee covers one shard. So with a column of users
as `id_column`, each user is protected with all rows. A position is no stable name: one edit can
renumber all later documents and move them to other shards (`Corpus.positional`).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from adapmixed.data.builtin import private_documents
from adapmixed.errors import missing_extra
from adapmixed.text import (
    Document,
    check_kind,
    check_text,
    file_documents,
    files_below,
    kind_of,
    relative_name,
    text_lines,
)

BUILTIN = "builtin"
HUB = "hub:"
_HUB = re.compile("hub:(?P<name>[^:@]+)(?::(?P<config>[^:@]+))?(?:@(?P<revision>.+))?")
_HUB_FORM = "hub:NAME[:CONFIG][@REVISION]"
_ROWS = ("hub", "csv", "json", "parquet")
csv.field_size_limit((1 << 31) - 1)  # of the whole process; a text may be longer than 128 KiB

Row = tuple[str, Mapping[str, Any]]
"""The row's place, as a phrase for errors, and its columns."""
Render = Callable[[list[dict[str, Any]]], str] | None  # from messages to text


@dataclass(frozen=True)
class Corpus:
    """The source of documents and of their names.

    Attributes:
        source: "builtin", a file, a folder, or "hub:NAME[:CONFIG][@REVISION]" for a hub data set
            with its configuration and its commit, tag or branch.
        text_column: the column of rows that holds the text. A list of strings there is joined by
            line breaks.
        id_column: the column of rows that names the user or document, as a string or an integer;
            None for the row's position.
        split: the split of a hub data set; None for "train". Or "train", "validation", "test" or
            "all" for a folder; None if its names tell one split at most.
        new_document: a regular expression that matches the beginning of a document's first line
            or row, for text files and for rows without `id_column`; or None.
        chat_column: instead of `text_column`, a column of lists of {"role", "content"}, of which
            `render` of `documents` makes text; or None.

    Raises:
        ValueError: if an attribute does not apply to the source.
    """

    source: str
    text_column: str = "text"
    id_column: str | None = None
    split: str | None = None
    new_document: str | None = None
    chat_column: str | None = None

    def __post_init__(self) -> None:
        rows = self.kind in _ROWS
        folder = self.kind not in (BUILTIN, "hub") and Path(self.source).is_dir()
        if self.split is not None and self.kind != "hub" and not folder:
            raise ValueError(f"split applies to folders and hub data sets, got {self.split}")
        for name in ("id_column", "chat_column"):
            if (got := getattr(self, name)) is not None and not rows:
                raise ValueError(f"{name} applies to rows, not to {self.name}: {got!r}")
        if self.chat_column is not None and self.text_column != "text":
            raise ValueError(f"chat_column excludes text_column, got {self.chat_column!r}")
        if self.id_column == self._column:
            raise ValueError(
                f"id_column must not be the text_column, got {self.id_column!r}: an edit of a text "
                "would move it to another shard"
            )
        if self.new_document is None:
            return
        if not self.positional or self.chat_column is not None:
            raise ValueError(
                "new_document must be unset for conversations and if documents have names, got "
                f"{self.new_document!r}"
            )
        try:
            re.compile(self.new_document)
        except re.error as error:
            raise ValueError(
                f"new_document must be a regular expression, got {self.new_document!r}: {error}"
            ) from error

    @cached_property
    def kind(self) -> str:
        """The kind of the source: "builtin", "hub", "text", "csv", "json" or "parquet".

        Raises:
            ValueError: if the source is of no such kind, or if a folder holds several kinds, none,
                or files that are not read.
        """
        if self.source == BUILTIN:
            return BUILTIN
        if self.source.startswith(HUB):
            if _HUB.fullmatch(self.source) is None:
                raise ValueError(f"corpus must be {_HUB_FORM}, got {self.source!r}")
            return "hub"
        path = Path(self.source)
        if not path.exists():
            raise ValueError(
                f"corpus must be a file, a folder, {BUILTIN!r} or {_HUB_FORM}, got {self.source!r}"
            )
        if path.is_file():
            check_kind("corpus", path)
            return kind_of(path) or "text"
        kinds = set(self._below)
        if len(kinds) != 1:
            content = " and ".join(sorted(kinds)) or "none of them"
            raise ValueError(
                f"corpus must be a folder of *.txt, *.csv, *.jsonl or *.parquet files, but {path} "
                f"holds {content}"
            )
        return kinds.pop()

    @property
    def name(self) -> str:
        """The source's name, without a path of this machine."""
        if self._hub is not None:
            return HUB + self._hub["name"]
        return self.source if self.kind == BUILTIN else Path(self.source).resolve().name

    @property
    def unit(self) -> str:
        """A phrase that says what one identifier stands for."""
        if self.id_column is not None:
            return f"all documents of one {self.id_column!r}"
        if self.kind == BUILTIN:
            return "topic"
        if self._is_text_folder:
            return "document (file)"
        return f"document ({'article' if self.kind == 'text' else 'row'}, by its position)"

    @property
    def positional(self) -> bool:
        """True if documents are named by position, so that an edit can rename later ones."""
        return self.id_column is None and self.kind != BUILTIN and not self._is_text_folder

    def with_new_document(self, pattern: str | None) -> Corpus:
        """Return this corpus with a default for `new_document` if documents have no names."""
        if not self.positional or self.chat_column or self.new_document is not None:
            return self
        return replace(self, new_document=pattern)

    def description(self) -> dict[str, Any]:
        """Return the description of the corpus for a manifest, which holds no name of a file."""
        columns = self.kind in _ROWS and self.chat_column is None
        return {
            "source": self.name,
            "unit": self.unit,
            "text_column": self.text_column if columns else None,
            "chat_column": self.chat_column,
            "id_column": self.id_column,
            "split": self.split or ("train" if self.kind == "hub" else None),
            "config": self._hub and self._hub["config"],
            "revision": self._hub and self._hub["revision"],
            "new_document": self.new_document,
        }

    def documents(self, render: Render = None) -> Iterator[Document]:
        """Yield the documents that hold text, in the order of the source.

        Args:
            render: makes text of a conversation; needed for `chat_column` alone.

        Raises:
            ValueError: while reading, if a column is missing, an identifier is neither a string
                nor an integer, or a text or a conversation is none. The message names the place.
        """
        if self.chat_column is not None and render is None:
            raise ValueError(f"render must be given for chat_column {self.chat_column!r}, got None")
        if self.kind == BUILTIN:
            return iter(private_documents())
        if self._is_text_folder:
            return file_documents(self._path, self._files())
        if self.kind == "text":
            return _article_documents(self._path, self.new_document)
        return (d for part in self._parts() for d in self._row_documents(*part, render))

    @property
    def _path(self) -> Path:
        """The source, or the only text file of its split, if that lies there by its name."""
        source = Path(self.source)
        if self.split in (None, "all") or self.kind != "text":
            return source
        files = self._below["text"]
        return files[0] if len(files) == 1 and files[0].parent == source else source

    @property
    def _hub(self) -> re.Match[str] | None:
        return _HUB.fullmatch(self.source)

    @property
    def _column(self) -> str:
        return self.chat_column or self.text_column

    @property
    def _is_text_folder(self) -> bool:
        return self.kind == "text" and self._path.is_dir()

    @cached_property
    def _below(self) -> dict[str, list[Path]]:
        return files_below("corpus", Path(self.source), self.split)

    def _files(self) -> list[Path]:
        return [self._path] if self._path.is_file() else self._below[self.kind]

    def _parts(self) -> Iterator[tuple[str, Iterator[Row]]]:
        """Yield (name, rows) of every file or of the data set; positions count within each."""
        if self._hub is not None:
            name, config, revision = self._hub.groups()
            split = self.split or "train"
            yield split, _hub_rows(name, config, revision, split)
            return
        columns = [self._column, *([self.id_column] if self.id_column is not None else [])]
        for file in self._files():
            if self.kind == "parquet":
                rows = _parquet_rows(file, columns)
            else:
                rows = _csv_rows(file) if self.kind == "csv" else _json_rows(file)
            yield relative_name(self._path, file), rows

    def _row_documents(self, part: str, rows: Iterator[Row], render: Render) -> Iterator[Document]:
        documents: Iterator[tuple[str | None, str]] = (
            (self._name(where, row), self._text(where, row, render)) for where, row in rows
        )
        if self.new_document is not None:
            texts = (text for _, text in documents)
            documents = ((None, text) for text in _joined(texts, self.new_document))
        for number, (name, text) in enumerate(documents):
            if text.strip():
                yield Document(f"{part}#{number}" if name is None else name, text)

    def _name(self, where: str, row: Any) -> str | None:
        column = self.id_column
        if column is None:
            return None
        _check_column(where, column, list(row))
        value = row[column]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise ValueError(f"{where}: {column} must be a name or an integer, got {value!r}")
        return check_text(f"{where}: {column}", str(value))

    def _text(self, where: str, row: Any, render: Render) -> str:
        _check_column(where, self._column, list(row))
        value = row[self._column]
        if value is None:
            return ""
        if render is not None and self.chat_column:
            value = _conversation(f"{where}: {self.chat_column}", value, render)
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            value = "\n".join(value)
        if not isinstance(value, str):
            raise ValueError(f"{where}: {self._column} must be text, got {type(value).__name__}")
        return check_text(f"{where}: {self._column}", value)


def _conversation(where: str, value: Any, render: Callable[..., str]) -> str:
    """Return the text of a conversation; raise ValueError for anything else."""
    messages = []
    for number, message in enumerate(value if isinstance(value, list) else [None]):
        items = message.items() if isinstance(message, dict) else ()
        entries = {k: v for k, v in items if v is not None}  # Parquet adds None for missing keys
        if not all(isinstance(entries.get(key), str) for key in ("role", "content")):
            wanted = '{"role": text, "content": text}'
            raise ValueError(f"{where} must be a list of {wanted}, but message {number} is not one")
        messages.append(entries)
    try:
        return render(messages) if messages else ""
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError(f"{where} must fit the base's chat template: {error}") from error


def _article_documents(file: Path, new_document: str | None) -> Iterator[Document]:
    """Yield the articles of one file, named by their position: `name#0`, `name#1` ...

    Without `new_document`, blank lines separate them. Articles without text are neither yielded nor
    counted. So an edit that begins, joins or empties an article renames all later ones.

    Raises:
        ValueError: if the file is not UTF-8.
    """
    lines = text_lines(file)
    if new_document is None:
        parts = groupby(lines, key=lambda line: bool(line.strip()))
        texts: Iterator[str] = ("".join(part) for _, part in parts)
    else:
        texts = _joined(lines, new_document)
    for number, text in enumerate(text for text in texts if text.strip()):
        yield Document(f"{file.name}#{number}", text.strip("\n"))


def _joined(texts: Iterable[str], new_document: str) -> Iterator[str]:
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


def _json_rows(file: Path) -> Iterator[Row]:
    """Yield the objects of a file of JSON lines, without blank lines.

    Raises:
        ValueError: if a line is no JSON object; the message names it.
    """
    for number, line in enumerate(text_lines(file), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} must be a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} must be a JSON object, got {type(row).__name__}")
        yield where, row


def _csv_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns.

    Raises:
        ValueError: if a row has more or fewer columns, or a column occurs twice.
    """
    reader = csv.DictReader(text_lines(file), strict=True)
    try:
        names = reader.fieldnames or ()
        for name in names:
            _check_column(str(file), name, names)
        for row in reader:
            where = f"{file}, line {reader.line_num}"
            if None in row or None in row.values():
                got = "more" if None in row else "fewer"
                raise ValueError(f"{where} must have {len(names)} columns, got {got}")
            yield where, row
    except csv.Error as error:
        raise ValueError(f"{file} must be a CSV file: {error}") from error


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[Row]:
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
            _check_column(str(file), column, table.schema_arrow.names)
        number = 0
        for batch in table.iter_batches(batch_size=1024, columns=list(columns)):
            for row in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", row


def _hub_rows(name: str, config: str | None, revision: str | None, split: str) -> Iterator[Row]:
    """Yield the rows of one split of a data set, streamed through `datasets`.

    The data set lies on the hub, or in a local folder that `datasets` can load.

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


def _check_column(where: str, column: str, names: Sequence[str]) -> None:
    """Raise ValueError unless there is one such column; the message names those that exist."""
    if column not in names:
        listed = ", ".join(sorted(map(str, names)))
        raise ValueError(f"{where}: column must be one of {listed}, got {column!r}")
    if names.count(column) > 1:
        raise ValueError(f"{where}: columns must differ, got two with the name {column!r}")
