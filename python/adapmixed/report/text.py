"""Format all tables of a report for a terminal, from the content of report.json."""

from collections.abc import Mapping
from typing import Any

from adapmixed.report.diagnostics import utility_table
from adapmixed.report.over_time import over_time
from adapmixed.report.runs import runs_table
from adapmixed.report.table import printable, table
from adapmixed.report.verdict import verdict
from adapmixed.report.view import read_methods, run_words


def report_text(report: Mapping[str, Any]) -> str:
    """Return what was run, the tables and, at the end, the verdict on every mechanism."""
    methods, runs = read_methods(report), report.get("runs")
    lines = [printable(run_words(report["config"], methods)), ""]
    lines.append(runs_table(runs) if runs else table(report))
    if not runs and any(method.method == "per-shard budget" for method in methods):
        lines += ["", *over_time(methods)]
    utility = utility_table(methods)
    if utility:
        lines += ["", *utility]
    sentences = [printable(one) for one in verdict(runs or report["methods"])]
    lines += ["", *sentences] if sentences else []
    return "\n".join(lines)
