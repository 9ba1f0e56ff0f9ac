"""Write report.json."""

import json
from collections.abc import Mapping
from pathlib import Path

from adapmixed.files import write_file


def report_json(report: Mapping[str, object]) -> str:
    """Return a report as strict JSON text.

    Raises:
        ValueError: if JSON cannot hold a value.
    """
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_report(report: Mapping[str, object], folder: Path | str) -> Path:
    """Write report.json atomically and return its path.

    Args:
        report: the result of :func:`build_report`.
        folder: the folder, which is created if it is missing.

    Raises:
        ValueError: if JSON cannot hold a value.
    """
    path = Path(folder) / "report.json"
    text = report_json(report)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode("utf-8"))
    return path
