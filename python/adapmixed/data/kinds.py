"""Tell the kind of a local file from its suffix, in upper or lower case."""

from __future__ import annotations

from pathlib import Path

KINDS = {
    ".txt": "text", ".jsonl": "json", ".jsonlines": "json", ".ndjson": "json",
    ".parquet": "parquet",
}  # fmt: skip
_ROWS = "rows of JSON lines (*.jsonl) or Parquet"
# As plain text, all rows of a table would be one document, although they belong to many people.
_REFUSED = {
    **dict.fromkeys(".csv .tsv .tab .xls .xlsx .xlsm .xlsb .ods .arrow .feather".split(), _ROWS),
    ".json": "one JSON object a line (*.jsonl)",
    **dict.fromkeys(
        ".gz .bz2 .xz .zst .lz4 .lzma .zip .7z .rar .tar .tgz .tbz2 .txz".split(), "unpacked files"
    ),
}


def kind_of(file: Path) -> str | None:
    """Return the file's kind, a value of `KINDS`, or None for any other suffix."""
    return KINDS.get(file.suffix.lower())


def check_kind(name: str, file: Path, allowed: str | None = None) -> None:
    """Raise ValueError for a file of a kind that is known not to be read.

    Args:
        name: the argument's name, for the message.
        file: the file; an unknown suffix passes as text.
        allowed: the only kind that is read; None for all of `KINDS`.
    """
    words = _REFUSED.get(file.suffix.lower())
    kind = kind_of(file)
    if words is None and allowed is not None and kind not in (None, allowed):
        words = f"{allowed}, no rows"
    if words is not None:
        raise ValueError(f"{name} must hold {words}, got {file}")


def files_below(name: str, folder: Path) -> dict[str, list[Path]]:
    """Return the files below a folder by kind, sorted, without files of other suffixes.

    Raises:
        ValueError: if there are tables or archives, which must not be left out silently, or a file
            has two names there: its text would be two documents, which may be in two shards.
    """
    found: dict[str, list[Path]] = {}
    names: dict[tuple[int, int], Path] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        kind = kind_of(file)
        if kind is not None:
            status = file.stat()
            other = names.setdefault((status.st_dev, status.st_ino), file)
            if other is not file:
                raise ValueError(f"{name} must hold each file once, but {other} and {file} are one")
            found.setdefault(kind, []).append(file)
        elif file.suffix.lower() != ".json":  # data sets describe themselves in such files
            check_kind(name, file)
    return found
