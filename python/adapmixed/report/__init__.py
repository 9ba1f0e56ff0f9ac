"""The operator's report: a table, report.json and one self-contained HTML page with figures."""

from adapmixed.report.build import build_report, environment
from adapmixed.report.html import write_report
from adapmixed.report.table import table

__all__ = ["build_report", "environment", "table", "write_report"]
