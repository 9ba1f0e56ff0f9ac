"""``adapmixed keys``: add, list and remove the keys of a server.

Add, list and remove the keys of 'adapmixed serve'. A file of keys holds a hash of each. A running
server reads it again after SIGHUP.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from adapmixed.commands.options import columns

LIMITS = {
    "max-tokens": "largest max_tokens of a request (default: the server's)",
    "tokens": "share of the budget: tokens that all answers may have together (default: no limit)",
    "requests-per-minute": "largest number of requests at once, and of further ones in each minute "
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
        for limit, told in LIMITS.items() if name == "add" else ():
            action.add_argument(f"--{limit}", type=int, metavar="N", help=told)
        if name == "list":
            told = "the server's ledger: also print used tokens, those of removed keys, too"
            action.add_argument("--ledger", type=Path, metavar="FILE", help=told)


def run(arguments: argparse.Namespace) -> int:
    """Add, list or remove keys."""
    from adapmixed.serving.admission import LIMITS, add_key, read_keys, read_usage, remove_key

    file = arguments.file
    if arguments.action == "add":
        print(add_key(file, arguments.name, **{name: getattr(arguments, name) for name in LIMITS}))
        return 0
    if arguments.action == "remove":
        remove_key(file, arguments.name)
        return 0
    used = None if arguments.ledger is None else read_usage(arguments.ledger)

    def row(name: str, limits: list[int | None]) -> list[str]:
        count = [] if used is None else [str(used.get(name, 0))]
        return [name, *count, *("-" if limit is None else str(limit) for limit in limits)]

    keys = read_keys(file)
    rows = [["name", *([] if used is None else ["used"]), *LIMITS]]
    rows += [row(key.name, [getattr(key, limit) for limit in LIMITS]) for key in keys]
    for name in sorted((used or {}).keys() - {key.name for key in keys}):
        rows.append([*row(name, []), "removed", *[""] * (len(LIMITS) - 1)])
    print(columns(rows))
    return 0
