"""The command line: ``adapmixed COMMAND``, one module of `adapmixed.commands` each."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from adapmixed import __version__
from adapmixed.commands import (
    chat,
    demo,
    doctor,
    evaluate,
    generate,
    ledger,
    mechanisms,
    plan,
    train,
)
from adapmixed.commands.options import as_typed, unknown_options

_COMMANDS = (demo, train, evaluate, generate, chat, mechanisms, plan, ledger, doctor)


def _parser() -> argparse.ArgumentParser:
    return parser_of(
        "adapmixed",
        "Private next-token prediction for ensembles of fine-tuned language models.",
        _COMMANDS,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error is one line on standard error and exit status 2."""
    return run_command(_parser(), arguments, lambda parsed: int(parsed.run(parsed)))


def parser_of(prog: str, description: str, modules: Iterable[Any]) -> argparse.ArgumentParser:
    """Return the parser of a program with these commands; the laboratory has its own."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in modules:
        module.add_parser(commands)
    for name, command in commands.choices.items():
        private = "nothing of what depends on private text"
        if name == "train":
            private = "validation losses among them, which are the operator's"
        command.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            help=f"log the steps on standard error, {private}",
        )
    return parser


def run_command(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    run: Callable[[argparse.Namespace], int],
) -> int:
    """Parse the arguments, run the command, and say in one line what went wrong.

    Returns:
        the exit status: the command's, or 2 after an error.
    """
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(unknown_options(unknown))
    try:
        with _logging(parsed.verbose):
            status = run(parsed)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # whoever reads has seen enough, `| head` for instance
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to flush
        return 141  # as a shell says of a program that SIGPIPE ended
    except (ValueError, OSError, RuntimeError) as error:
        text = as_typed(" ".join(str(error).split()))
        print(f"{parser.prog} {parsed.command}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


@contextmanager
def _logging(shown: bool) -> Iterator[None]:
    """Show the packages' logs on standard error while a command runs, if asked to."""
    if not shown:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    loggers = [logging.getLogger(name) for name in ("adapmixed", "adapmixed_lab")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
