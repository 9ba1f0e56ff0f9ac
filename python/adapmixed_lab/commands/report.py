"""``adapmixed-lab report``: redraw tables and figures from a result file alone."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from adapmixed.commands.options import check_output

_MALFORMED = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="draw tables and figures from a result file",
        description="Print the tables of a result file: a report.json, the file of 'evaluate "
        "--json' or 'evaluate --result' (finished or not), or a JSON file of 'reproduce'. With "
        "--out, also write the page and every figure. No models are needed. Results are for the "
        "operator.",
    )
    parser.add_argument("result", type=Path, metavar="RESULT.json", help="the result file")
    parser.add_argument("--out", type=Path, help="folder for the page, tables as JSON, and *.svg")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables and write the files."""
    path: Path = arguments.result
    content = _read(path)
    redraw = _REDRAW[_kind(path, content)]
    check_output(arguments.out, folder=True)
    try:
        redraw(path, content, arguments.out)
    except _MALFORMED as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"{path} must be an unchanged result file, reading it raised {error!r}"
        ) from error
    return 0


def _read(path: Path) -> Mapping[str, Any]:
    from adapmixed.privacy.encoding import parse

    try:
        content = parse(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} must be a JSON file, it is truncated or not JSON: {error}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _kind(path: Path, content: Mapping[str, Any]) -> str:
    """Return the kind of a file from its "kind", else from entries that only one kind has."""
    if "kind" in content:
        kind = content["kind"]
    elif {"methods", "config"} <= content.keys():
        kind = "report"
    elif {"configuration", "state"} <= content.keys():
        kind = "evaluation"
    elif {"experiment", "rows"} <= content.keys():
        kind = "experiment"
    else:
        kind = None
    if not isinstance(kind, str) or kind not in _REDRAW:
        named = "" if kind is None else f" (its kind is {kind!r})"
        raise ValueError(
            f"{path} must be a report.json, the file of 'evaluate --json' or 'evaluate --result', "
            f"or a JSON file of 'reproduce', got another kind of file{named}"
        )
    return kind


def _redraw_report(path: Path, content: Mapping[str, Any], out: Path | None) -> None:
    from adapmixed.report import report_text
    from adapmixed.report.view import FORMAT_VERSION

    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"{path}: format_version must be {FORMAT_VERSION}, got {version!r}")
    print(report_text(content))
    if out is not None:
        from adapmixed_lab.figures.html import write_page

        for written in write_page(content, out, figures=True):
            print(f"wrote {written}")


def _redraw_evaluation(path: Path, content: Mapping[str, Any], out: Path | None) -> None:
    from adapmixed.evaluation import read_result
    from adapmixed_lab.figures.stored import stored_report

    stored = read_result(path)  # checks version and checksum
    try:
        report = stored_report(stored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _redraw_report(path, report, out)
    if not stored.complete:
        print(f"\nUnder way: {report['config']['answered']}.")  # type: ignore[index]


def _redraw_experiment(path: Path, content: Mapping[str, Any], out: Path | None) -> None:
    from adapmixed_lab.reproduce.outputs import write_outputs
    from adapmixed_lab.reproduce.result import read_experiment
    from adapmixed_lab.reproduce.tables import text

    result = read_experiment(path)  # checks the version
    print(text(result))
    if out is not None:
        for written in write_outputs(result, out):
            print(f"wrote {written}")


# A new kind of result file needs its redraw(path, content, out) here and its "kind" above.
_REDRAW: dict[str, Callable[[Path, Mapping[str, Any], Path | None], None]] = {
    "report": _redraw_report,
    "evaluation": _redraw_evaluation,
    "experiment": _redraw_experiment,
}
