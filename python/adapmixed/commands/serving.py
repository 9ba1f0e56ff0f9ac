"""The options that ``generate``, ``chat`` and ``serve`` share, and what is made from them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.commands.mechanisms import (
    add_mechanism_options,
    check_charged,
    check_chosen,
    check_ledger,
    mechanism_of,
)
from adapmixed.commands.options import (
    add_active_option,
    memory_bytes,
    quiet_libraries,
    random_source,
)
from adapmixed.commands.placing import add_placing_options, joined_ranks, load_ensemble
from adapmixed.commands.plan_file import take_plan
from adapmixed.limits import check_count

if TYPE_CHECKING:
    from adapmixed.generation import PrivateGenerator
    from adapmixed.mechanisms import Mechanism
    from adapmixed.privacy import Accountant


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for the models, the choice of tokens and the ledger."""
    add_model_options(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        help="maximum number of tokens of an answer (default: 64)",
    )
    add_shape_options(parser)
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="text that ends an answer; may be repeated",
    )
    parser.add_argument(
        "--seed",
        type=int,
        help="seed for repeatable randomness; never use it to release text (default: the system's "
        "randomness)",
    )
    add_account_options(parser)
    parser.add_argument(
        "--operator",
        action="store_true",
        help="PRIVATE: also print costs that depend on private data, to standard error",
    )
    add_mechanism_options(parser)
    add_placing_options(parser)


def add_model_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --base and --ensemble."""
    parser.add_argument("--base", required=required, help="public model: folder or hub name")
    parser.add_argument("--ensemble", required=required, help="ensemble folder (ensemble.json)")


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add --temperature, --top-k and --active."""
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="temperature of every model, applied before the mechanism (default: 1)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        help="keep this many tokens, the public model's likeliest, before the mechanism "
        "(default: all)",
    )
    add_active_option(parser)


def add_account_options(parser: argparse.ArgumentParser) -> None:
    """Add --ledger, --no-create and --memory."""
    parser.add_argument(
        "--ledger",
        type=Path,
        help="ledger file; every token is charged there, durably, before it is drawn",
    )
    parser.add_argument(
        "--no-create",
        action="store_true",
        help="end with an error if there is no ledger at --ledger",
    )
    parser.add_argument(
        "--memory",
        type=memory_bytes,
        default=1 << 30,
        help="memory for logits, activations, keys and values, such as 512M or 5G (default: 1G)",
    )


def shape_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate` that shape an answer."""
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "stop_strings": arguments.stop,
    }


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
    take_plan(arguments)
    text = check_chosen(arguments.mechanism)
    if arguments.ledger is not None and arguments.seed is not None:
        raise ValueError(
            f"--seed cannot be used with --ledger, got {arguments.seed}: whoever knows a seed can "
            "undo the randomness"
        )
    mechanism = mechanism_for(arguments, text, queries)
    if arguments.ledger is not None:
        check_ledger(text, epsilon=arguments.epsilon, queries=queries)
    if arguments.no_create and arguments.ledger is None:
        raise ValueError("--no-create needs --ledger, the file that must exist")
    quiet_libraries()
    from adapmixed.generation import PrivateGenerator
    from adapmixed.mechanisms.rows import check_shape

    check_shape(arguments.temperature, arguments.top_k)
    check_count("max_new_tokens", arguments.max_new_tokens)

    with joined_ranks(arguments) as ranks:
        if ranks.is_main and arguments.ledger is not None:
            check_place(arguments)
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


def mechanism_for(arguments: argparse.Namespace, text: str, queries: int) -> Mechanism:
    """Return the mechanism that a text describes, for --epsilon, --delta and --adjacency.

    Raises:
        ValueError: as `mechanism_of` and `check_charged`, before a ledger is made.
    """
    guarantee = {"delta": arguments.delta, "epsilon": arguments.epsilon}
    mechanism = mechanism_of(text, **guarantee, queries=queries, way=arguments.adjacency)
    check_charged(mechanism, **guarantee, way=arguments.adjacency)
    return mechanism


def check_place(arguments: argparse.Namespace) -> None:
    """Raise ValueError for a ledger that cannot be opened, before the models are loaded."""
    path = arguments.ledger
    if path.is_dir():
        raise ValueError(f"--ledger must name a file, got the folder {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--ledger must name a file in an existing folder, got {path}")
    if arguments.no_create and not path.exists():
        raise ValueError(f"--ledger must name an existing ledger with --no-create, got {path}")


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
        elif accountant.durable:
            print(f"Ledger {path}: {accountant.charges} records so far.", file=sys.stderr)
        try:
            yield accountant
        except BaseException:
            accountant.close(empty=not is_new)
            if is_new and not path.exists():
                print(f"Ledger {path} was removed: nothing was charged.", file=sys.stderr)
            raise
        finally:
            if accountant.queries:
                _print_costs(arguments, accountant)


def _print_costs(arguments: argparse.Namespace, accountant: Accountant) -> None:
    for line in cost_lines(accountant, operator=arguments.operator):
        print(line, file=sys.stderr)
    if accountant.durable and (words := all_ledgers(arguments.ensemble, arguments.ledger)):
        print(words, file=sys.stderr)
    if not accountant.durable and accountant.guarantee().kind == "fixed":
        print(
            "This account ends here. Its ε adds to that of other runs. --ledger keeps one account.",
            file=sys.stderr,
        )


def all_ledgers(ensemble: str | Path, path: Path | None = None) -> str:
    """Return what an ensemble's ledgers have spent; "" if the one at a path is alone."""
    from adapmixed.privacy import read_ledger
    from adapmixed.privacy.register import together

    try:
        found = together(ensemble, None if path is None else read_ledger(path, whole=False))
        return found.words if found.ledgers > 1 or path is None else ""
    except (OSError, ValueError) as error:
        return f"The ledgers of this ensemble could not be added up: {error}"


def cost_lines(accountant: Accountant, *, operator: bool) -> Iterator[str]:
    """Yield lines about what was charged; private numbers only if `operator` is set."""
    guarantee = accountant.guarantee()
    if guarantee.kind.startswith("data-dependent") and not operator:
        yield (
            f"{guarantee.queries} answered queries; their cost depends on the private data and is "
            "for the operator alone (--operator, 'adapmixed ledger show')."
        )
        yield from guarantee.warnings
    else:
        yield str(guarantee)
    if accountant.durable:
        yield f"The ledger holds {accountant.charges} records; the guarantee covers all of them."
    if operator and accountant.epsilon is not None:
        yield f"PRIVATE, for the operator: spent of a budget of {accountant.limit:.6g}, by member:"
        for number, amount in enumerate(accountant.spent):
            yield f"{number:>6}  {amount:.6g}"
