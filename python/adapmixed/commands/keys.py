"""``adapmixed keys``: add, list and remove the keys of a server.

Add, list and remove the keys of 'adapmixed serve'. A file of keys holds a hash of each. A running
server reads it again once it has changed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from adapmixed.commands.options import columns

LIMITS = {
    "max_tokens": "largest max_tokens of a request (default: the server's)",
    "tokens": "share of the budget: tokens that all answers may have together (default: no limit)",
    "requests_per_minute": "largest number of requests at once, and of further ones in each minute "
    "(default: no limit)",
}
ACTIONS = {
    "add": "make a key, add its hash to a file, which may be new, and print the key once",
    "list": "print the names and limits of all keys, and no hash",
    "remove": "remove a key; what the client used stays counted, also for a new key of its name",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument("file", type=Path, metavar="FILE", help="file of keys")
        if name != "list":
            action.add_argument("name", metavar="NAME", help="name of the client")
        for limit, words in LIMITS.items() if name == "add" else ():
            action.add_argument(f"--{limit.replace('_', '-')}", type=int, metavar="N", help=words)


def run(arguments: argparse.Namespace) -> int:
    """Add, list or remove keys."""
    from adapmixed.serving.admission import add_key, read_keys, remove_key

    file = arguments.file
    if arguments.action == "add":
        print(add_key(file, arguments.name, **{name: getattr(arguments, name) for name in LIMITS}))
    elif arguments.action == "remove":
        remove_key(file, arguments.name)
    else:
        rows = [["name", *LIMITS]]
        for key in read_keys(file):
            limits = (getattr(key, name) for name in LIMITS)
            rows.append([key.name, *("-" if limit is None else str(limit) for limit in limits)])
        print(columns(rows))
    return 0
