"""What a local file holds, by the end of its name, in whatever case that is written."""

from __future__ import annotations

from pathlib import Path

KINDS = {
    ".txt": "text", ".jsonl": "json", ".jsonlines": "json", ".ndjson": "json",
    ".parquet": "parquet",
}  # fmt: skip
_ROWS = "rows of JSON lines (*.jsonl) or Parquet"
# Read as running text, the rows of a table would be one document, whoever they belong to.
_REFUSED = {
    **dict.fromkeys((".csv", ".tsv", ".tab", ".xls", ".xlsx", ".arrow", ".feather"), _ROWS),
    ".json": "one JSON object a line (*.jsonl)",
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"), "unpacked files"),
}


def kind_of(file: Path) -> str | None:
    """One of the values of `KINDS`, or None for any other name."""
    return KINDS.get(file.suffix.lower())


def check_kind(name: str, file: Path, allowed: str | None = None) -> None:
    """Refuses a file whose content is known not to be read.

    Args:
        name: of the argument, for the message.
        file: of any name.
        allowed: the kind that is read alone; None: all of `KINDS`. Other names pass as text.
    """
    words = _REFUSED.get(file.suffix.lower())
    kind = kind_of(file)
    if words is None and allowed is not None and kind not in (None, allowed):
        words = f"{allowed}, no rows"
    if words is not None:
        raise ValueError(f"{name} must hold {words}, got {file}")


def files_below(name: str, folder: Path) -> dict[str, list[Path]]:
    """The files beneath a folder by their kind, sorted; files of other names are left out.

    Raises:
        ValueError: tables and archives are among them, which would be left out silently.
    """
    found: dict[str, list[Path]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        kind = kind_of(file)
        if kind is not None:
            found.setdefault(kind, []).append(file)
        elif file.suffix.lower() != ".json":  # what data sets say about themselves
            check_kind(name, file)
    return found
