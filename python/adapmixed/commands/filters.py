"""Options of the per-model filter, and what may be said about who has spent what."""

import argparse
import sys
from typing import TYPE_CHECKING

from adapmixed.commands.options import default_value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from adapmixed.privacy import FilterBudget, PerModelFilter

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
        "more than 1/(K+1), ..., K/(K+1) of what their answers may spend",
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
    if counts is not None and getattr(arguments, "ledger", None) is not None:
        raise ValueError(
            f"--release-counts cannot be used with --ledger, got {counts}: their cost would not be "
            "in it"
        )
    from adapmixed.privacy import FilterBudget

    order = default_value(arguments.order, 8.0) if name == "clipped-mixing" else None
    adjacency = default_value(arguments.adjacency, "zero_out")
    budget = FilterBudget.for_epsilon(epsilon, arguments.delta, order=order, adjacency=adjacency)
    model_filter_of(arguments, budget, 1)  # refuses releases that the budget does not hold
    return budget


def model_filter_of(
    arguments: argparse.Namespace,
    budget: "FilterBudget | None",
    num_models: int,
    spent: "NDArray[np.float64] | None" = None,
) -> "PerModelFilter | None":
    """A filter of that budget with the releases that were asked for; None without a budget."""
    if budget is None:
        return None
    from adapmixed.privacy import PerModelFilter

    return PerModelFilter(
        num_models,
        budget,
        releases=default_value(arguments.release_counts, 0),
        sigma=arguments.release_sigma,
        spent=spent,
    )


def release_counts(model_filter: "PerModelFilter") -> list[dict[str, float]]:
    """All releases of a filter: public.

    Returns:
        for each {"spent_above": share of `model_filter.available`, "noisy_count": ...}.
    """
    from adapmixed.rng import SecureRandom
    from adapmixed_ext import gaussian

    releases, rng = model_filter.releases, SecureRandom()
    found = []
    for number in range(1, releases + 1):
        share = number / (releases + 1)
        threshold = share * model_filter.available
        count = model_filter.noisy_count(threshold, gaussian, rng=rng)
        found.append({"spent_above": share, "noisy_count": count})
    return found


def count_lines(counts: list[dict[str, float]], sigma: float | None) -> list[str]:
    """The counts in words."""
    return [
        f"Models that have spent more than {one['spent_above']:.0%} of what answers may: "
        f"{one['noisy_count']:.0f}, with noise of standard deviation {sigma:g}; may be published."
        for one in counts
    ]


def show_spent(model_filter: "PerModelFilter") -> None:
    """Who has spent what, on standard error: private."""
    budget = model_filter.budget.amount
    print(
        f"PRIVATE, for the operator: spent of a budget of {budget:.6g}, by model:", file=sys.stderr
    )
    for number, amount in enumerate(model_filter.spent):
        print(f"{number:>6}  {amount:.6g}", file=sys.stderr)
