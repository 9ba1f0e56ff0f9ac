"""The operator's report: a table, report.json and one self-contained HTML page with figures."""

from adapmixed.report.build import build_report, environment, plain
from adapmixed.report.html import write_report
from adapmixed.report.table import aligned, table
from adapmixed.report.text import report_text

__all__ = [
    "aligned",
    "build_report",
    "environment",
    "plain",
    "report_text",
    "table",
    "write_report",
]
