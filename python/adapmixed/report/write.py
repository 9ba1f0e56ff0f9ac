"""report.json, written."""

import json
from collections.abc import Mapping
from pathlib import Path

from adapmixed.files import write_file


def report_json(report: Mapping[str, object]) -> str:
    """Return a report as the text of a file: strict JSON; ValueError for what it cannot hold."""
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_report(report: Mapping[str, object], folder: Path | str) -> Path:
    """Write report.json, replaced as a whole or not at all, and return its path.

    Args:
        report: from :func:`build_report`.
        folder: created if it is missing.

    Raises:
        ValueError: a value that strict JSON cannot hold.
    """
    path = Path(folder) / "report.json"
    text = report_json(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode("utf-8"))
    return path
