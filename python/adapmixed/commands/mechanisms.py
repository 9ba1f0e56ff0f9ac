"""``adapmixed mechanisms``: list the names and keys of --mechanism.

List the mechanisms, or the keys of one mechanism with their defaults.
"""

import argparse
import inspect

from adapmixed.commands.options import keys_of, kinds
from adapmixed.limits import check_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "name", nargs="?", help="mechanism whose keys to list (default: list names)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print all mechanisms, or one mechanism with its keys."""
    for name in kinds() if arguments.name is None else (arguments.name,):
        check_option("name", name, tuple(kinds()))
        first = (inspect.getdoc(kinds()[name]) or "").split("\n\n")[0]
        print(f"{name}: {' '.join(first.split())}")
        if arguments.name is not None:
            for key, default in keys_of(name).items():
                print(f"  {key}={'none' if default in (None, ()) else default}")
    return 0
