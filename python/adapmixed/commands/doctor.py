"""``adapmixed doctor``: print versions, build facts and hardware."""

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "doctor",
        help="print versions, build facts and hardware",
        description="Print the installed versions, how the extension was built, and the hardware "
        "in use. Nothing is changed or sent anywhere.",
    )
    parser.add_argument(
        "--base",
        help="public model (folder or hub name): also print which layers members could share",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print a line for every fact."""
    from adapmixed.commands.options import say_hub
    from adapmixed.doctor import report_lines, sharing_lines

    if arguments.base is not None:
        say_hub(arguments.base)
    print("\n".join(report_lines()))
    if arguments.base is not None:
        print("\n".join(sharing_lines(arguments.base)))
    return 0
