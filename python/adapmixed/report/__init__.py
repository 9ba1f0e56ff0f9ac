"""Write the operator's report: tables for a terminal, and report.json."""

from adapmixed.report.report import Report, aligned, environment, plain, training_losses

__all__ = ["Report", "aligned", "environment", "plain", "training_losses"]
