"""``adapmixed keys``: add, list and remove the keys of the clients of ``adapmixed serve``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adapmixed.serving.keys import Key

LIMITS = {
    "max-tokens": "largest max_tokens of a request (default: the server's)",
    "tokens": "share of the budget: tokens that all answers may have together (default: no limit)",
    "requests-per-minute": "largest number of requests at once, and of further ones in each minute "
    "(default: no limit)",
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "keys",
        help="add, list and remove the keys of a server",
        description="Add, list and remove the keys of 'adapmixed serve'. A file of keys holds a "
        "hash of each. A running server reads it again after SIGHUP.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = _action(
        actions,
        "add",
        _add,
        help="make a key and print it once",
        description="Make a key, add its hash to a file of keys, and print the key. It cannot be "
        "shown again.",
        file="file of keys; it may be new",
    )
    add.add_argument("name", metavar="NAME", help="name of the client")
    for name, text in LIMITS.items():
        add.add_argument(f"--{name}", type=int, metavar="N", help=text)
    listing = _action(
        actions,
        "list",
        _list,
        help="print names, limits and used tokens",
        description="Print the name and the limits of every key, but no hash.",
    )
    listing.add_argument(
        "--ledger",
        type=Path,
        help="the server's ledger: also print the tokens that were used, by removed keys, too",
    )
    remove = _action(
        actions,
        "remove",
        _remove,
        help="remove a key",
        description="Remove a key from a file. A running server lets it in until it gets SIGHUP. "
        "What the client has used stays counted, also for a new key with its name.",
    )
    remove.add_argument("name", metavar="NAME", help="name of the client")


def _action(
    actions: Any, name: str, run: Any, *, help: str, description: str, file: str = "file of keys"
) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(name, help=help, description=description)
    action.add_argument("file", type=Path, metavar="FILE", help=file)
    action.set_defaults(run=run)
    return action


def _add(arguments: argparse.Namespace) -> int:
    from adapmixed.serving.keys import LIMITS, add_key

    limits = {name: getattr(arguments, name) for name in LIMITS}
    try:
        print(add_key(arguments.file, arguments.name, **limits))
    except BlockingIOError:
        raise _busy(arguments.file) from None
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    from adapmixed.serving.keys import remove_key

    try:
        remove_key(arguments.file, arguments.name)
    except BlockingIOError:
        raise _busy(arguments.file) from None
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from adapmixed.serving.clients import read_usage
    from adapmixed.serving.keys import read_keys

    keys = read_keys(arguments.file)
    used = None if arguments.ledger is None else read_usage(arguments.ledger)
    rows = list(_rows(keys, used))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


def _rows(keys: list[Key], used: dict[str, int] | None) -> list[list[str]]:
    """Return the lines of the list, each as its cells."""
    from adapmixed.serving.keys import LIMITS

    def row(name: str, limits: list[int | None]) -> list[str]:
        count = [] if used is None else [str(used.get(name, 0))]
        return [name, *count, *("-" if limit is None else str(limit) for limit in limits)]

    rows = [["name", *([] if used is None else ["used"]), *LIMITS]]
    rows += [row(key.name, [getattr(key, limit) for limit in LIMITS]) for key in keys]
    for name in sorted((used or {}).keys() - {key.name for key in keys}):
        rows.append([*row(name, []), "removed", *[""] * (len(LIMITS) - 1)])
    return rows


def _busy(file: Path) -> ValueError:
    return ValueError(f"{file} must not be written by another process")
