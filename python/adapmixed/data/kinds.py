"""Tell the kind of a local file from its suffix, and its split from its name, in any case."""

from __future__ import annotations

import re
from pathlib import Path

KINDS = {
    ".txt": "text", ".tokens": "text", ".jsonl": "json", ".jsonlines": "json", ".ndjson": "json",
    ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip
_ROWS = "rows of CSV, JSON lines (*.jsonl) or Parquet"
# As plain text, all rows of a table would be one document, although they belong to many people.
_REFUSED = {
    **dict.fromkeys(".tsv .tab .xls .xlsx .xlsm .xlsb .ods .arrow .feather".split(), _ROWS),
    ".json": "one JSON object a line (*.jsonl)",
    **dict.fromkeys(
        ".gz .bz2 .xz .zst .lz4 .lzma .zip .7z .rar .tar .tgz .tbz2 .txz".split(), "unpacked files"
    ),
}

# The words by which names of files and folders tell the split, as in the library `datasets`.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
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


def files_below(name: str, folder: Path, choose: str, split: str | None) -> dict[str, list[Path]]:
    """Return the files below a folder by kind, sorted, without files of other suffixes.

    Args:
        name: the argument's name, for the message.
        folder: the folder.
        choose: how to choose one of several splits, for the message.
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
        raise ValueError(f"{name} must hold one split, but {folder} holds {listed}: {choose}")
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
