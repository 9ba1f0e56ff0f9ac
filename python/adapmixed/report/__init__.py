"""Write the operator's report: tables for a terminal, and report.json."""

from adapmixed.report.report import Report, environment, plain, training_losses
from adapmixed.report.table import aligned

__all__ = ["Report", "aligned", "environment", "plain", "training_losses"]
