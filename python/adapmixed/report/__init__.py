"""Write the operator's report: tables for a terminal, and report.json."""

from adapmixed.report.build import build_report, environment, plain, report_json, write_report
from adapmixed.report.table import aligned, table
from adapmixed.report.text import report_text

__all__ = [
    "aligned",
    "build_report",
    "environment",
    "plain",
    "report_json",
    "report_text",
    "table",
    "write_report",
]
