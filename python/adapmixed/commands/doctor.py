"""``adapmixed doctor``: what is installed, built and used."""

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("doctor", help="what is installed, built and used")
    parser.add_argument("--base", help="public model to try: what can its members share?")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for every fact."""
    from adapmixed.doctor import report_lines, sharing_lines

    print("\n".join(report_lines()))
    if arguments.base is not None:
        print("\n".join(sharing_lines(arguments.base)))
    return 0
