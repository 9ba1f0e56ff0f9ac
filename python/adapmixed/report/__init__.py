"""The operator's report: a table, report.json and one self-contained HTML page with figures."""

from adapmixed.report.build import build_report, environment, plain
from adapmixed.report.html import write_report
from adapmixed.report.table import aligned, table

__all__ = ["aligned", "build_report", "environment", "plain", "table", "write_report"]
