"""What ``generate`` and ``chat`` share: their options, and a generator made from them."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from adapmixed.commands.filters import (
    add_filter_options,
    count_lines,
    filter_budget_of,
    model_filter_of,
    release_counts,
    show_spent,
)
from adapmixed.commands.options import (
    add_mechanism_options,
    add_refused_options,
    mechanism_of,
    memory_bytes,
    quiet_libraries,
    random_source,
)
from adapmixed.commands.placing import add_placing_options, joined_ranks, load_ensemble

if TYPE_CHECKING:
    from adapmixed.generation import PrivateGenerator
    from adapmixed.mechanisms import Mechanism
    from adapmixed.models import Ensemble
    from adapmixed.privacy import Accountant, FilterBudget, Ledger, PerModelFilter
    from adapmixed.ranks import Ranks


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Where the models are, how tokens are chosen, and who is charged."""
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--ensemble", required=True, help="ensemble folder (ensemble.json)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each answer")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of every row, before it is projected"
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends an answer; may be repeated",
    )
    parser.add_argument(
        "--overflow",
        choices=("refuse", "slide"),
        default="refuse",
        help="where the model's window is full: refuse, or forget its older half",
    )
    parser.add_argument("--seed", type=int, help="repeatable randomness (never for serving)")
    parser.add_argument(
        "--ledger", type=Path, help="charge every token there, durably before it is written"
    )
    parser.add_argument(
        "--keep-counts",
        action="store_true",
        help="leave what --ledger has reserved of --release-counts to a later run",
    )
    parser.add_argument(
        "--memory",
        type=memory_bytes,
        default=1 << 30,
        help="of logits, activations, keys and values, e.g. 512M or 5G (1G)",
    )
    add_mechanism_options(parser)
    add_filter_options(parser)
    add_refused_options(parser)
    add_placing_options(parser)


@contextmanager
def opened(arguments: argparse.Namespace, queries: int) -> "Iterator[PrivateGenerator]":
    """A generator as the options describe it; at the end standard error says what was charged.

    Under `torchrun` every rank has one; the one that leads has the ledger and says what it cost.

    Args:
        queries: at most so many: what a budget is for unless --budget-queries says otherwise.
    """
    if arguments.ledger is not None and arguments.seed is not None:
        raise ValueError(
            f"--seed cannot be used with --ledger, got {arguments.seed}: whoever knows a seed can "
            "undo the randomness"
        )
    if arguments.keep_counts and None in (arguments.ledger, arguments.release_counts):
        raise ValueError("--keep-counts needs --release-counts and --ledger, where they are kept")
    budget = filter_budget_of(arguments)
    mechanism = _mechanism(arguments, queries)
    quiet_libraries()
    with joined_ranks(arguments) as ranks:
        with _generator(arguments, ranks, mechanism, budget) as generator:
            yield generator


@contextmanager
def _generator(
    arguments: argparse.Namespace,
    ranks: "Ranks",
    mechanism: "Mechanism",
    budget: "FilterBudget | None",
) -> "Iterator[PrivateGenerator]":
    from adapmixed.generation import PrivateGenerator
    from adapmixed.privacy import Accountant

    ensemble = load_ensemble(arguments, ranks)
    accountant = Accountant(
        arguments.delta, rule=arguments.rule, adjacency=arguments.adjacency, filter_budget=budget
    )
    ledger = _ledger(arguments, ensemble, mechanism, budget) if ranks.leads else None
    model_filter, ended = None, False
    try:
        spent = None if ledger is None else ledger.accountant.individual_spent
        model_filter = model_filter_of(budget, ensemble.num_models, spent)
        yield PrivateGenerator(
            ensemble,
            mechanism,
            accountant=accountant,
            rng=random_source(arguments.seed),
            ledger=ledger,
            model_filter=model_filter,
            overflow=arguments.overflow,
            memory_bytes=arguments.memory,
        )
        ended = True
    finally:
        try:
            if accountant.queries:  # also of a conversation that was broken off; on one rank alone
                kept = ledger is not None and (arguments.keep_counts or not ended)
                for line in _account(arguments, accountant, ledger, model_filter, kept):
                    print(line, file=sys.stderr)
            if model_filter is not None and arguments.operator and ranks.leads:
                show_spent(model_filter)
        finally:
            if ledger is not None:
                ledger.close()


def _mechanism(arguments: argparse.Namespace, queries: int) -> "Mechanism":
    from adapmixed.mechanisms import Shaped

    shape: dict[str, float | int] = {}
    if arguments.temperature != 1.0:
        shape["temperature"] = arguments.temperature
    if arguments.top_k is not None and not arguments.mechanism.startswith("clipped"):
        # The clipped mechanisms have it themselves, and then read fewer logits.
        shape["top_k"] = arguments.top_k
        arguments = argparse.Namespace(**(vars(arguments) | {"top_k": None}))
    mechanism = mechanism_of(arguments, queries)
    return Shaped(mechanism, **shape) if shape else mechanism  # type: ignore[arg-type]


def _ledger(
    arguments: argparse.Namespace,
    ensemble: "Ensemble",
    mechanism: "Mechanism",
    budget: "FilterBudget | None",
) -> "Ledger | None":
    if arguments.ledger is None:
        return None
    from adapmixed.charging import ledger_configuration
    from adapmixed.privacy import Ledger

    ledger = Ledger.open(
        arguments.ledger,
        delta=arguments.delta,
        rule=arguments.rule,
        adjacency=arguments.adjacency,
        configuration=ledger_configuration(ensemble, mechanism),
        filter_budget=budget,
    )
    print(f"Ledger {ledger.path}: {ledger.charges} charges so far.", file=sys.stderr)
    return ledger


def _account(
    arguments: argparse.Namespace,
    accountant: "Accountant",
    ledger: "Ledger | None",
    model_filter: "PerModelFilter | None",
    kept: bool,
) -> Iterator[str]:
    """What was charged; what depends on private data, for the operator alone.

    Args:
        kept: counts are left to a later run, as a ledger can; those before are shown by it.
    """
    guarantee = accountant.epsilon()
    if guarantee.kind.startswith("data-dependent") and not arguments.operator:
        yield (
            f"{guarantee.queries} answered queries; what they cost depends on the private data and "
            "is for the operator alone (--operator)."
        )
        yield from guarantee.warnings
        if ledger is not None:
            yield f"Ledger {ledger.path}: {ledger.charges} charges."
        return
    yield str(guarantee)
    if ledger is not None:
        yield f"Ledger {ledger.path}, all {ledger.charges} charges: {ledger.totals}"
    if model_filter is None or not model_filter.budget.releases:
        return
    before = 0 if ledger is None else len(ledger.accountant.released_counts)
    if before or kept:
        words = f"{before} of {model_filter.budget.releases} noisy counts were released before."
        yield f"{words} This run leaves the rest to a later one." if kept else words
    if not kept:
        counts = release_counts(model_filter, ledger)
        yield from count_lines(counts, model_filter.budget.sigma)
