"""Options of the per-model filter, and what may be said about who has spent what."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from adapmixed.commands.options import default_value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from adapmixed.privacy import FilterBudget, Ledger, PerModelFilter

# Why no filter runs on them: what it may charge is a function of one shard and public values.
_NO_FILTER = {
    "adapmixed": "its losses depend on the other models, and its screening tells a bit about all "
    "of them, retired ones included, that no model's charge covers",
    "pmixed": "its charge is the same for every model, fixed for a number of queries",
    "public": "it reads no private model",
    "unprotected": "it has no bound that could be charged",
}


def add_filter_options(parser: argparse.ArgumentParser) -> None:
    """--filter-epsilon and what goes with it."""
    group = parser.add_argument_group("per-model filter (clipped mechanisms)")
    group.add_argument(
        "--filter-epsilon",
        type=float,
        help="a per-model filter with this epsilon instead of a number of queries",
    )
    group.add_argument(
        "--release-counts",
        type=int,
        metavar="K",
        help="at the end release K noisy counts, paid from the budget: how many models have spent "
        "more than 1/(K+1), ..., K/(K+1) of what their answers may spend; K in the whole life of a "
        "ledger, which then shows them again",
    )
    group.add_argument(
        "--release-sigma", type=float, metavar="S", help="standard deviation of their noise"
    )
    group.add_argument(
        "--operator",
        action="store_true",
        help="PRIVATE: say also what depends on private data, on standard error: what each model "
        "has spent, and an epsilon that is not fixed",
    )


def filter_budget_of(arguments: argparse.Namespace) -> "FilterBudget | None":
    """The budget that --filter-epsilon asks for; None without it. Refuses bad combinations."""
    epsilon, name = arguments.filter_epsilon, arguments.mechanism
    counts, sigma = arguments.release_counts, arguments.release_sigma
    if (counts is None) != (sigma is None):
        raise ValueError(
            f"--release-counts and --release-sigma must be given together, got {counts!r} and "
            f"{sigma!r}"
        )
    if epsilon is None:
        if counts is not None:
            raise ValueError(
                "--release-counts needs --filter-epsilon: nothing is spent without one"
            )
        return None
    if not name.startswith("clipped"):
        raise ValueError(
            f"--filter-epsilon does not apply to {name}, got {epsilon!r}: {_NO_FILTER[name]}"
        )
    if arguments.budget_queries is not None:
        raise ValueError(
            f"--budget-queries does not apply to a filter, got {arguments.budget_queries!r}"
        )
    if counts is not None and arguments.seed is not None:
        raise ValueError(
            f"--seed cannot be used with --release-counts, got {arguments.seed}: the counts are "
            "public, and whoever knows a seed can undo the randomness"
        )
    from adapmixed.privacy import FilterBudget

    order = default_value(arguments.order, 8.0) if name == "clipped-mixing" else None
    adjacency = default_value(arguments.adjacency, "zero_out")
    return FilterBudget.for_epsilon(
        epsilon,
        arguments.delta,
        order=order,
        adjacency=adjacency,
        releases=default_value(counts, 0),
        sigma=sigma,
    )


def model_filter_of(
    budget: "FilterBudget | None",
    num_models: int,
    spent: "NDArray[np.float64] | None" = None,
) -> "PerModelFilter | None":
    """A filter of that budget; None without one."""
    from adapmixed.privacy import PerModelFilter

    return None if budget is None else PerModelFilter(num_models, budget, spent=spent)


def release_counts(
    model_filter: "PerModelFilter", ledger: "Ledger | None" = None
) -> Iterator[dict[str, float]]:
    """All releases of a filter: public. Beside a ledger those that it holds are given again.

    Yields:
        for each {"spent_above": share of `budget.available`, "noisy_count": ...}, as it is
        released.
    """
    from adapmixed.rng import SecureRandom

    budget, rng = model_filter.budget, SecureRandom()
    released = () if ledger is None else ledger.accountant.released_counts
    known = {one.threshold: one.noisy_count for one in released}
    for number in range(1, budget.releases + 1):
        share = number / (budget.releases + 1)
        threshold = share * budget.available
        count = known.get(threshold)
        if count is None:
            count = model_filter.noisy_count(threshold, rng=rng)
        yield {"spent_above": share, "noisy_count": count}


def count_lines(counts: Iterable[dict[str, float]], sigma: float | None) -> Iterator[str]:
    """The counts in words, one by one."""
    for one in counts:
        yield (
            f"Models that have spent more than {one['spent_above']:.0%} of what answers may: "
            f"{one['noisy_count']}, with noise of standard deviation {sigma:g}; may be "
            "published."
        )


def show_spent(model_filter: "PerModelFilter") -> None:
    """Who has spent what, on standard error: private."""
    budget = model_filter.budget.amount
    print(
        f"PRIVATE, for the operator: spent of a budget of {budget:.6g}, by model:", file=sys.stderr
    )
    for number, amount in enumerate(model_filter.spent):
        print(f"{number:>6}  {amount:.6g}", file=sys.stderr)
