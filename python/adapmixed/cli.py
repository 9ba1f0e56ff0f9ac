"""The command line ``adapmixed COMMAND``, with one module of `adapmixed.commands` per command.

A module's docstring is its help, `add_arguments` adds the options, and `run` does the work.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from adapmixed import __version__
from adapmixed.commands.options import as_typed

_COMMANDS = (
    "demo", "train", "evaluate", "compare", "generate", "synthesize", "chat", "serve", "keys",
    "mechanisms", "plan", "ledger", "doctor",
)  # fmt: skip


class _Help(argparse.HelpFormatter):
    """A help of one screen, whose usage has the required arguments alone."""

    def add_usage(
        self, usage: Any, actions: Iterable[argparse.Action], groups: Any, prefix: Any = None
    ) -> None:
        required = [action for action in actions if action.required]
        usage = " ".join([self._format_usage(None, required, (), "").strip(), "[option ...]"])
        super().add_usage(usage, required, (), prefix)


def _parser(typed: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the command that is typed first, or else of all commands."""
    names = [name for name in _COMMANDS if name in typed[:1]] or _COMMANDS
    return parser_of(
        "adapmixed",
        "Private next-token prediction for ensembles of fine-tuned language models.",
        [import_module(f"adapmixed.commands.{name}") for name in names],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    An error prints one line on standard error and gives exit status 2.
    """
    typed = sys.argv[1:] if arguments is None else arguments
    return run_command(_parser(typed), typed, lambda parsed: int(parsed.run(parsed)))


def parser_of(prog: str, description: str, modules: Iterable[Any]) -> argparse.ArgumentParser:
    """Return the parser of a program with the commands of these modules."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in modules:
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        first, _, description = (module.__doc__ or "").partition("\n\n")
        text = first.partition("``: ")[2].removesuffix(".")
        command = commands.add_parser(name, help=text, description=description)
        module.add_arguments(command)
        private = ", PRIVATE" if name == "train" else ", without private values"
        text = f"log the steps to standard error{private}"
        command.add_argument("-v", "--verbose", action="store_true", help=text)
        command.formatter_class = partial(_Help, max_help_position=27)
        command.allow_abbrev = False  # --n of other libraries is no short form of --no-create
        command.set_defaults(run=module.run, options=frozenset(command._option_string_actions))
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    typed: Sequence[str],
    run: Callable[[argparse.Namespace], int],
) -> int:
    """Parse what is typed, run the command, and print an error as one line.

    Returns:
        The exit status of the command, or 2 after an error.
    """
    parsed = parser.parse_args(typed)
    if not sys.stderr.isatty():  # also of transformers, which is not imported yet
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        with _logging(parsed.verbose):
            status = run(parsed)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to flush
        return 141  # a shell's status for a program that SIGPIPE ended
    except (ValueError, OSError, RuntimeError) as error:
        text = as_typed(" ".join(str(error).split()), parsed.options)
        print(f"{parser.prog} {parsed.command}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


@contextmanager
def _logging(shown: bool) -> Iterator[None]:
    """Show the library's log on standard error while a command runs, if `shown`."""
    logger, handler = logging.getLogger("adapmixed"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    if shown:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
