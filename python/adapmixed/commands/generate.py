"""``adapmixed generate``: a privately generated continuation of a prompt."""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from adapmixed.mechanisms import Mechanism
    from adapmixed.privacy import FilterBudget, Ledger


def add_parser(commands: Any) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "generate",
        help="continue a prompt privately",
        description="Continues a prompt token by token. Every token is one query; standard output "
        "carries the text alone, standard error what it cost.",
    )
    parser.add_argument("--base", required=True, help="public model: folder or hub name")
    parser.add_argument("--ensemble", required=True, help="ensemble folder (ensemble.json)")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, help="repeatable randomness (never for serving)")
    parser.add_argument(
        "--ledger", type=Path, help="charge every token there, durably before it is written"
    )
    parser.add_argument("--memory", type=memory_bytes, default=1 << 30, help="e.g. 512M or 2G")
    add_mechanism_options(parser)
    add_filter_options(parser)
    add_refused_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generates, streaming the text as it is released."""
    budget = filter_budget_of(arguments)
    mechanism = mechanism_of(arguments, max(arguments.max_new_tokens, 1))
    with ExitStack() as stack:
        ledger = None
        if arguments.ledger is not None:
            ledger = stack.enter_context(_ledger(arguments, mechanism, budget))
        return _generate(arguments, mechanism, ledger, budget)


def _ledger(
    arguments: argparse.Namespace, mechanism: "Mechanism", budget: "FilterBudget | None"
) -> "Ledger":
    from adapmixed.privacy import Ledger

    if arguments.seed is not None:
        raise ValueError(
            f"--seed cannot be used with --ledger, got {arguments.seed}: whoever knows a seed can "
            "undo the randomness"
        )
    ledger = Ledger.open(
        arguments.ledger,
        delta=arguments.delta,
        rule=arguments.rule,
        adjacency=arguments.adjacency,
        configuration=repr(mechanism),
        filter_budget=budget,
    )
    print(f"Ledger {ledger.path}: {ledger.charges} charges so far.", file=sys.stderr)
    return ledger


def _generate(
    arguments: argparse.Namespace,
    mechanism: "Mechanism",
    ledger: "Ledger | None",
    budget: "FilterBudget | None",
) -> int:
    quiet_libraries()
    import torch

    from adapmixed.decoding import stream
    from adapmixed.models import Ensemble
    from adapmixed.privacy import Accountant

    ensemble = Ensemble.load(arguments.base, arguments.ensemble)
    tokenizer = ensemble.tokenizer
    if tokenizer is None:
        raise ValueError(f"--base must have a tokenizer, {arguments.base} has none")
    prompt = tokenizer(arguments.prompt, return_tensors="pt")["input_ids"]
    if prompt.shape[1] == 0:
        raise ValueError("--prompt must hold at least one token, got an empty one")
    accountant = Accountant(
        arguments.delta, rule=arguments.rule, adjacency=arguments.adjacency, filter_budget=budget
    )
    spent = None if ledger is None else ledger.accountant.individual_spent
    model_filter = model_filter_of(arguments, budget, ensemble.num_models, spent)
    released: list[int] = []
    shown = ""
    for tokens in stream(
        ensemble,
        mechanism,
        prompt.to(torch.int64),
        max_new_tokens=arguments.max_new_tokens,
        rng=random_source(arguments.seed),
        accountant=accountant,
        ledger=ledger,
        model_filter=model_filter,
        stop_token=tokenizer.eos_token_id,
        memory_bytes=arguments.memory,
    ):
        released.append(int(tokens[0]))
        text = tokenizer.decode(released, skip_special_tokens=True)
        # A token may end inside a character: it is written once the character is whole.
        if not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print(text[len(shown) :])
    print(str(accountant.epsilon()), file=sys.stderr)
    if ledger is not None:
        print(
            f"Ledger {ledger.path}, all {ledger.charges} charges: {ledger.totals}", file=sys.stderr
        )
    if model_filter is not None:
        for line in count_lines(release_counts(model_filter), model_filter.sigma):
            print(line, file=sys.stderr)
        if arguments.show_spent:
            show_spent(model_filter)
    return 0
