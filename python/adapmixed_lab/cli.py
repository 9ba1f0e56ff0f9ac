"""The laboratory's command line: ``adapmixed-lab COMMAND``, one module of `commands` each."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from adapmixed.cli import parser_of, run_command
from adapmixed.data.rows import missing_extra
from adapmixed_lab.commands import audit, dp_sgd, report, reproduce

PACKAGES = ("matplotlib", "opacus", "scipy")
"""Of the extra `lab`."""


def _parser() -> argparse.ArgumentParser:
    return parser_of(
        "adapmixed-lab",
        "Reports with figures, the paper's tables and studies, audits, DP-SGD.",
        (report, reproduce, audit, dp_sgd),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error is one line on standard error and exit status 2."""
    return run_command(_parser(), arguments, _run)


def _run(parsed: argparse.Namespace) -> int:
    try:
        return int(parsed.run(parsed))
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise missing_extra("this command", error.name, "lab", error) from error
