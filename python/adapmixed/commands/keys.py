"""``adapmixed keys add``: make a key for a client of ``adapmixed serve``."""

import argparse
from pathlib import Path
from typing import Any

LIMITS = {
    "max-tokens": "largest max_tokens of a request (default: the server's)",
    "tokens": "share of the budget: tokens that all answers may have together (default: no limit)",
    "requests-per-minute": "requests in a minute, which may all come at once (default: no limit)",
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "keys",
        help="make keys for the clients of a server",
        description="Make keys for the clients of 'adapmixed serve'. A file of keys holds a hash "
        "of each. A server reads it at its start.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = actions.add_parser(
        "add",
        help="make a key and print it once",
        description="Make a key, add its hash to a file of keys, and print the key. It cannot be "
        "shown again.",
    )
    action.add_argument("file", type=Path, metavar="FILE", help="file of keys; it may be new")
    action.add_argument("name", metavar="NAME", help="name of the client")
    for name, text in LIMITS.items():
        action.add_argument(f"--{name}", type=int, metavar="N", help=text)
    action.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Add a key and print it."""
    from adapmixed.serving.keys import add_key

    limits = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in LIMITS}
    try:
        print(add_key(arguments.file, arguments.name, **limits))
    except BlockingIOError:
        raise ValueError(f"{arguments.file} must not be written by another process") from None
    return 0
