"""The command line: ``adapmixed COMMAND``, one module of `adapmixed.commands` each."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from adapmixed import __version__
from adapmixed.commands import (
    audit,
    chat,
    demo,
    evaluate,
    generate,
    ledger,
    mechanisms,
    plan,
    report,
    reproduce,
    train,
)
from adapmixed.commands.options import as_typed, unknown_options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adapmixed",
        description="Private next-token prediction for ensembles of fine-tuned language models.",
    )
    parser.add_argument("--version", action="version", version=f"adapmixed {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (
        demo, train, evaluate, generate, chat, mechanisms, plan, ledger, report, audit, reproduce,
    ):  # fmt: skip
        module.add_parser(commands)
    doctor = commands.add_parser("doctor", help="what is installed, built and used")
    doctor.add_argument("--base", help="public model to try: what can its members share?")
    doctor.set_defaults(run=_doctor)
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


def _doctor(arguments: argparse.Namespace) -> int:
    from adapmixed.doctor import report_lines, sharing_lines

    print("\n".join(report_lines()))
    if arguments.base is not None:
        print("\n".join(sharing_lines(arguments.base)))
    return 0


@contextmanager
def _logging(shown: bool) -> Iterator[None]:
    """Show the package's log on standard error while a command runs, if asked to."""
    if not shown:
        yield
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("adapmixed")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error is one line on standard error and exit status 2."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(unknown_options(unknown))
    try:
        with _logging(parsed.verbose):
            status = int(parsed.run(parsed))
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # whoever reads has seen enough, `| head` for instance
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to flush
        return 141  # as a shell says of a program that SIGPIPE ended
    except (ValueError, OSError, RuntimeError) as error:
        text = as_typed(" ".join(str(error).split()))
        print(f"adapmixed {parsed.command}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
