"""Accountants of every kind of total, by the events that make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ledger_cases import DELTA, losses

from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    FilterBudget,
    GaussianScreening,
    IndividualCharge,
    PerModelFilter,
    PublicAnswer,
    ReleasedCount,
    RenyiBound,
    UnprotectedAnswer,
)

BUDGET = FilterBudget("renyi", 0.3, DELTA, 4.0)
COUNTING = FilterBudget("renyi", 0.3, DELTA, 4.0, releases=100, sigma=100.0)

SCREENED = GaussianScreening(5, 2, 0.1, 1 / 3)


def charge(seed: int, models: int = 5) -> Event:
    values = np.random.default_rng(seed).exponential(0.01, (models, 3))
    return IndividualCharge("renyi", 4.0, values)


# Arguments of the accountant, and the n-th call of add.
CASES: dict[str, tuple[dict[str, Any], Callable[[int], list[Event]]]] = {
    "nothing": ({}, lambda n: []),
    "public": ({"adjacency": "replace_one"}, lambda n: [PublicAnswer(n), Caveat("base")]),
    "unprotected": ({}, lambda n: [UnprotectedAnswer(1), Caveat("seeded"), Caveat("shards")]),
    "losses": ({}, lambda n: [losses(n, positions=n), SCREENED, PublicAnswer(1)]),
    "the paper's rule": ({"rule": "paper"}, lambda n: [losses(n, positions=3)]),
    "orders": (
        {"order_weights": (0.25, 1 / 3), "adjacency": "add_remove"},
        lambda n: [losses(n, orders=(2.5, 18.0))],
    ),
    "many losses": ({}, lambda n: [losses(n, positions=1000)]),
    "a planned bound": ({}, lambda n: [RenyiBound(3.0, 0.1, 5, n, "zero_out", budget=100)]),
    "a published bound": ({}, lambda n: [RenyiBound(3.0, float("inf"), 5, 1, "zero_out", True)]),
    "no loss yet": ({}, lambda n: [losses(n, positions=0)]),
    "screenings": ({}, lambda n: [GaussianScreening(5, 1, 0.1 * n, 0.5)]),
    "clipped": ({"adjacency": "replace_one"}, lambda n: [ClippedAnswer(0.8, 1.5, 5, n, 100)]),
    "clipped, screened": ({}, lambda n: [SCREENED, ClippedAnswer(0.8, 1.5, 5, 2, 100)]),
    "pool": ({}, lambda n: [BoundedRangeAnswer(0.1 * n, -0.25, 1 / 3, 5, n), SCREENED]),
    "a pool of a constant N": (
        {"adjacency": "add_remove"},
        lambda n: [BoundedRangeAnswer(0.1 * n, -0.25, 0.5, 5, n, None, True)],
    ),
    "a planned pool": ({}, lambda n: [BoundedRangeAnswer(2.0, -0.25, 0.5, 5, n, 100)]),
    "filter": ({"filter_budget": BUDGET}, lambda n: [charge(n), PublicAnswer(n)]),
    "counts": (
        {"filter_budget": COUNTING},
        lambda n: [charge(n), ReleasedCount(5, 0.1 * n, 100.0, -n)],
    ),
}


def accountant(case: str) -> Accountant:
    """That of a case, before its first events."""
    made = Accountant(DELTA, **CASES[case][0])
    if made.filter_budget is not None:
        made.attach(PerModelFilter(5, made.filter_budget))
    return made
