"""A corpus named on a command line: documents and their identifiers, read as a stream.

| source | a document is | its identifier |
| --- | --- | --- |
| `builtin` | a paragraph of the language reference | the topic |
| a folder of `*.txt` | a file | its path in the folder |
| another text file | an article: blank lines, or `new_document`, separate | its position |
| `*.jsonl`, `*.parquet`, a folder of them, `hub:NAME` | a row | the value of `id_column` |
| the same without `id_column` | a row, or rows joined by `new_document` | its position |

Ends of names count in any case; `*.jsonlines` and `*.ndjson` are JSON lines, too. Tables of other
forms (`*.csv`, `*.tsv` ...) are refused: as text, everybody's rows would be one document.

Documents that share an identifier stay in one shard, so the identifier is what a shard's guarantee
is about: name a column of users, and each user is protected whole.

A name is stable: whatever happens to other documents, a document keeps its shard. A position is not
stable. It counts from the beginning of a file, or of the split of a hub data set, so one edit can
renumber all later documents there and move them to other shards (`Corpus.positional`):

| named by position | keeps all others in their shards | moves later ones |
| --- | --- | --- |
| rows | editing or emptying the text of a row | inserting or removing a row |
| articles between blank lines | changing words | a blank line inside one, emptying one |
| lines or rows joined by `new_document` | changing words | a match inside one, emptying one |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from adapmixed.data.builtin import Document, private_documents
from adapmixed.data.kinds import check_kind, files_below, kind_of
from adapmixed.data.rows import Row, check_column, hub_rows, json_rows, parquet_rows
from adapmixed.data.text import article_documents, file_documents, joined, relative_name

BUILTIN = "builtin"
HUB = "hub:"


@dataclass(frozen=True)
class Corpus:
    """Where documents come from, and what names them.

    Attributes:
        source: "builtin", "hub:NAME", a file or a folder.
        text_column: of rows; a list of strings there is joined by line breaks.
        id_column: of rows: the user or document, a string or an integer; None: the row's position.
        split, config, revision: of a hub data set; split None means "train".
        new_document: regular expression, matched at the beginning of a line or row that begins a
            document, for text files and for rows without `id_column`.
    """

    source: str
    text_column: str = "text"
    id_column: str | None = None
    split: str | None = None
    config: str | None = None
    revision: str | None = None
    new_document: str | None = None

    def __post_init__(self) -> None:
        rows = self.kind in ("hub", "json", "parquet")
        if self.kind != "hub":
            for name in ("split", "config", "revision"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} applies to hub data sets, got {getattr(self, name)}")
        if self.id_column is not None and not rows:
            raise ValueError(f"id_column applies to rows, not to {self.name}: {self.id_column!r}")
        if self.new_document is None:
            return
        if self._has_names:
            raise ValueError(
                f"new_document must be unset where documents have names, got {self.new_document!r}"
            )
        try:
            re.compile(self.new_document)
        except re.error as error:
            raise ValueError(
                f"new_document must be a regular expression, got {self.new_document!r}: {error}"
            ) from error

    @cached_property
    def kind(self) -> str:
        """ "builtin", "hub", "text", "json" or "parquet".

        Raises:
            ValueError: if the source is none of them, or a folder holds several kinds or none, or
                what is not read.
        """
        if self.source == BUILTIN:
            return BUILTIN
        if self.source.startswith(HUB):
            return "hub"
        path = Path(self.source)
        if not path.exists():
            raise ValueError(
                f"corpus must be a file, a folder, {HUB}NAME or {BUILTIN!r}, got {self.source!r}"
            )
        if path.is_file():
            check_kind("corpus", path)
            return kind_of(path) or "text"
        kinds = set(files_below("corpus", path))
        if len(kinds) != 1:
            found = " and ".join(sorted(kinds)) or "none of them"
            raise ValueError(
                f"corpus must be a folder of *.txt, of *.jsonl or of *.parquet files; {path} holds "
                f"{found}"
            )
        return kinds.pop()

    @property
    def name(self) -> str:
        """The source without a path of this machine."""
        return self.source if self.kind in (BUILTIN, "hub") else Path(self.source).resolve().name

    @property
    def unit(self) -> str:
        """What one identifier stands for, in words."""
        if self.id_column is not None:
            return f"all documents of one {self.id_column!r}"
        if self.kind == BUILTIN:
            return "topic"
        if self._is_text_folder:
            return "document (file)"
        return f"document ({'article' if self.kind == 'text' else 'row'}, by its position)"

    @property
    def positional(self) -> bool:
        """Whether documents are named by their position, so that an edit can rename later ones."""
        return not self._has_names

    def with_new_document(self, pattern: str | None) -> Corpus:
        """The same with a default for `new_document`, where documents have no names."""
        if pattern is None or self._has_names or self.new_document is not None:
            return self
        return replace(self, new_document=pattern)

    def description(self) -> dict[str, Any]:
        """What a manifest says about the corpus."""
        columns = self.kind in ("hub", "json", "parquet")
        return {
            "source": self.name,
            "unit": self.unit,
            "text_column": self.text_column if columns else None,
            "id_column": self.id_column,
            "split": self._split if self.kind == "hub" else None,
            "config": self.config,
            "revision": self.revision,
            "new_document": self.new_document,
        }

    def documents(self) -> Iterator[Document]:
        """Documents that hold text, in the order of the source.

        Raises:
            ValueError: while reading, naming the place: a column is missing, an identifier is
                neither string nor integer, a text is no text.
        """
        if self.kind == BUILTIN:
            return iter(private_documents())
        if self._is_text_folder:
            return file_documents(self._path, self._files())
        if self.kind == "text":
            return article_documents(self._path, self.new_document)
        if self.new_document is None:
            return (d for part in self._parts() for d in self._row_documents(*part))
        return (d for part in self._parts() for d in self._joined_documents(*part))

    @property
    def _path(self) -> Path:
        return Path(self.source)

    @property
    def _has_names(self) -> bool:
        return self.id_column is not None or self.kind == BUILTIN or self._is_text_folder

    @property
    def _is_text_folder(self) -> bool:
        return self.kind == "text" and self._path.is_dir()

    @property
    def _split(self) -> str:
        return self.split or "train"

    def _files(self) -> list[Path]:
        if self._path.is_file():
            return [self._path]
        return files_below("corpus", self._path)[self.kind]

    def _parts(self) -> Iterator[tuple[str, Iterator[Row]]]:
        """(name, rows) of every file, or of the data set; positions count within a part."""
        if self.kind == "hub":
            name = self.source.removeprefix(HUB)
            yield self._split, hub_rows(name, self.config, self._split, self.revision)
            return
        columns = [self.text_column, *([self.id_column] if self.id_column is not None else [])]
        for file in self._files():
            rows = json_rows(file) if self.kind == "json" else parquet_rows(file, columns)
            yield relative_name(self._path, file), rows

    def _row_documents(self, part: str, rows: Iterator[Row]) -> Iterator[Document]:
        for number, (where, row) in enumerate(rows):
            text = self._text(where, row)
            if self.id_column is None:
                identifier = f"{part}#{number}"
            else:
                identifier = _identifier(where, self.id_column, row)
            if text.strip():
                yield Document(identifier, text)

    def _joined_documents(self, part: str, rows: Iterator[Row]) -> Iterator[Document]:
        assert self.new_document is not None
        texts = (self._text(where, row) for where, row in rows)
        for number, text in enumerate(joined(texts, self.new_document)):
            if text.strip():
                yield Document(f"{part}#{number}", text)

    def _text(self, where: str, row: Any) -> str:
        check_column(where, self.text_column, list(row))
        value = row[self.text_column]
        if value is None:
            return ""
        if isinstance(value, list) and all(isinstance(line, str) for line in value):
            value = "\n".join(value)
        if not isinstance(value, str):
            raise ValueError(
                f"{where}: {self.text_column} must be text, got {type(value).__name__}"
            )
        return _encodable(where, self.text_column, value)


def _identifier(where: str, column: str, row: Any) -> str:
    check_column(where, column, list(row))
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError(f"{where}: {column} must be a name or an integer, got {value!r}")
    return _encodable(where, column, str(value))


def _encodable(where: str, column: str, value: str) -> str:
    """JSON can write half of a surrogate pair, which is no text."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {column} must be Unicode text: {error}") from error
    return value
