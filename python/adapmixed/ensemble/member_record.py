"""Read what training records in a member's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MEMBER_FILE = "shard.json"
FORMAT_VERSION = 1


def read_member_record(folder: Path) -> dict[str, Any]:
    """Return the content of `shard.json` in a member's folder.

    Returns:
        "shard" (its `partition.shard_record`), "tokens" (their number), "losses" of the epochs in
        nats per token, and "validation".

    Raises:
        ValueError: if the file is not JSON of this format.
    """
    path = folder / MEMBER_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(record).__name__}")
    version = record.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}")
    missing = {"shard", "tokens", "losses", "validation"} - record.keys()
    if missing:
        raise ValueError(f"{path} must hold {' and '.join(sorted(missing))}, but does not")
    return record
