"""``adapmixed generate``: continue prompts privately.

Continue prompts token by token. Every released token is one query. The text goes to standard
output, its guarantee to standard error. Several prompts are answered in batches and printed as JSON
lines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.ledger import all_ledgers
from adapmixed.commands.options import (
    MechanismOptions,
    SharedOptions,
    add_options,
    check_output,
    load_ensemble,
    mechanism_for,
    option,
    random_source,
)
from adapmixed.limits import check_count, check_optional_count

if TYPE_CHECKING:
    from adapmixed.generation import PrivateGenerator
    from adapmixed.privacy import Accountant


@dataclass
class AnswerOptions:
    """The options of `generate`, of which `chat` has those from --stop on."""

    prompt: list[str] | None = option("prompt to continue; may be repeated", metavar="TEXT")
    prompts: Path | None = option("UTF-8 file with one prompt per line")
    batch: int | None = option("prompts answered together (default: as --memory allows)")
    stop: list[str] | None = option("text that ends an answer; may be repeated", metavar="TEXT")
    seed: int | None = option("seed, for text that is not released (default: the system's)")
    operator: bool = option("PRIVATE: print costs that depend on private data, too")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_options(parser, AnswerOptions, "prompt prompts batch")
    add_serving_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Generate, and write the text as it is released."""
    prompts = _prompts(arguments)
    check_optional_count("--batch", arguments.batch)
    queries = max(arguments.max_new_tokens, 1) * len(prompts)
    options = shape_of(arguments)
    with opened(arguments, queries) as generator:
        is_main = generator.ensemble.ranks.is_main
        if len(prompts) == 1:
            show((piece for (piece,) in generator.stream(prompts, **options)), is_main)
        else:
            shape = {"temperature": arguments.temperature, "top_k": arguments.top_k}
            limits = (arguments.max_new_tokens, arguments.batch)
            for batch in generator.batches(prompts, *limits, **shape):
                texts = generator.generate(batch, **options)
                for prompt, text in zip(batch, texts, strict=True) if is_main else ():
                    line = {"prompt": prompt, "text": text}
                    print(json.dumps(line, ensure_ascii=False), flush=True)
    return 0


def _prompts(arguments: argparse.Namespace) -> list[str]:
    from adapmixed.text import text_lines

    prompts = list(arguments.prompt or ())
    if arguments.prompts is not None:
        lines = "".join(text_lines(arguments.prompts)).rstrip("\n").split("\n")
        if blank := [number for number, line in enumerate(lines, start=1) if not line.strip()]:
            raise ValueError(
                f"--prompts must have a prompt in every line, line {blank[0]} of "
                f"{arguments.prompts} is blank"
            )
        prompts += lines
    if not prompts:
        raise ValueError("--prompt or --prompts must give at least one prompt, got none")
    return prompts


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the models, the choice of tokens and the ledger."""
    add_options(parser, SharedOptions, "base ensemble max_new_tokens temperature top_k active")
    add_options(parser, AnswerOptions, "stop seed operator")
    add_options(parser, SharedOptions, "ledger no_create memory")
    add_options(parser, MechanismOptions, title="mechanism and guarantee")
    add_options(parser, SharedOptions, "device dtype")


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate` that shape an answer."""
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "stop_strings": arguments.stop or [],
    }


def show(pieces: Iterable[str], is_main: bool = True) -> str:
    """Return an answer, which the main process writes as it is released; all take part."""
    text = ""
    for piece in pieces:
        text += piece
        if is_main:
            print(piece, end="", flush=True)
    if is_main:
        print()
    return text


@contextmanager
def opened(arguments: argparse.Namespace, queries: int) -> Iterator[PrivateGenerator]:
    """Open the generator that the options describe, and print its costs at the end.

    Under `torchrun` every process has a generator. The main process alone has the accountant, and
    prints the costs on standard error.

    Args:
        arguments: the command's arguments.
        queries: the largest number of queries; a fixed guarantee is planned for them unless
            --mechanism says otherwise.

    Raises:
        ValueError: if options are missing or exclude each other, before a file is read or made.
    """
    if arguments.ledger is not None and arguments.seed is not None:
        raise ValueError(
            f"--seed cannot be used with --ledger, got {arguments.seed}: whoever knows a seed can "
            "undo the randomness"
        )
    if arguments.no_create and arguments.ledger is None:
        raise ValueError("--no-create needs --ledger, the file that must exist")
    mechanism = mechanism_for(arguments, queries)
    from adapmixed.generation import PrivateGenerator
    from adapmixed.mechanisms.rows import check_shape
    from adapmixed.ranks import joined

    check_shape(arguments.temperature, arguments.top_k)
    check_count("max_new_tokens", arguments.max_new_tokens)

    with joined(cuda=arguments.device == "cuda") as ranks:
        if ranks.is_main:
            check_output("--ledger", arguments.ledger)
        ensemble = load_ensemble(arguments, ranks)
        with accounted(arguments) if ranks.is_main else nullcontext() as accountant:
            yield PrivateGenerator(
                ensemble,
                mechanism,
                accountant,
                rng=random_source(arguments.seed),
                memory_bytes=arguments.memory,
                active=arguments.active,
            )


@contextmanager
def accounted(arguments: argparse.Namespace) -> Iterator[Accountant]:
    """Open the accountant that the options describe, and print its costs at the end.

    They are printed even after an interruption.
    """
    from adapmixed.privacy import Accountant

    path = arguments.ledger
    is_new = path is not None and not path.exists()
    with Accountant(
        arguments.delta,
        epsilon=arguments.epsilon,
        path=path,
        adjacency=arguments.adjacency,
        create=not arguments.no_create,
    ) as accountant:
        if is_new:
            print(f"Ledger {path} is new.", file=sys.stderr)
        elif path is not None:
            print(f"Ledger {path}: {accountant.charges} records so far.", file=sys.stderr)
        try:
            yield accountant
        except BaseException:
            accountant.close(empty=not is_new)  # a new ledger without a charge is removed
            raise
        finally:
            if accountant.queries:
                _print_costs(arguments, accountant)


def _print_costs(arguments: argparse.Namespace, accountant: Accountant) -> None:
    """Print what was charged; private numbers only with --operator."""
    guarantee, operator = accountant.guarantee(), arguments.operator
    lines = [str(guarantee)]
    if guarantee.kind.startswith("data-dependent") and not operator:
        lines = [
            f"{guarantee.queries} answered queries; their cost depends on the private data and is "
            "for the operator alone (--operator, 'adapmixed ledger show').",
            *guarantee.warnings,
        ]
    if arguments.ledger is not None:
        held = f"The ledger holds {accountant.charges} records"
        lines += [f"{held}; the guarantee covers all of them."]
    if operator and accountant.epsilon is not None:
        limit = f"{accountant.limit:.6g}"
        lines += [f"PRIVATE, for the operator: spent of a budget of {limit}, by member:"]
        lines += [f"{number:>6}  {amount:.6g}" for number, amount in enumerate(accountant.spent)]
    if arguments.ledger is not None and (
        words := all_ledgers(arguments.ensemble, arguments.ledger)
    ):
        lines += [words]
    if arguments.ledger is None and guarantee.kind == "fixed":
        lines += [
            "This account ends here. Its ε adds to that of other runs. --ledger keeps one account."
        ]
    print(*lines, sep="\n", file=sys.stderr)
