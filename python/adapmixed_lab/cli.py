"""The command line ``adapmixed-lab COMMAND``, with one module of `commands` per command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from adapmixed.cli import parser_of, run_command
from adapmixed.errors import missing_extra
from adapmixed_lab.commands import audit, compare, dp_sgd, reproduce

PACKAGES = ("matplotlib", "opacus", "scipy")
"""Packages of the extra `lab`."""


def _parser() -> argparse.ArgumentParser:
    return parser_of(
        "adapmixed-lab",
        "Reproduce the paper, compare methods, audit privacy claims, and train with DP-SGD.",
        (reproduce, compare, audit, dp_sgd),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    An error prints one line on standard error and gives exit status 2.
    """
    return run_command(_parser(), sys.argv[1:] if arguments is None else arguments, _run)


def _run(parsed: argparse.Namespace) -> int:
    try:
        return int(parsed.run(parsed))
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise missing_extra("this command", error.name, "lab", error) from error
