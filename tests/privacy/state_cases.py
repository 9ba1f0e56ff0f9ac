"""Accountants with every kind of total, by the events that make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from accountant_cases import DELTA, losses

from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)

SCREENED = GaussianScreening(5, 2, 0.1, 1 / 3)


def realised(seed: int, positions: int = 1, orders: Any = (18.0,), **changes: Any) -> Event:
    values = np.random.default_rng(seed).exponential(1e-4, (5, positions, len(orders)))
    return losses(values, orders, **changes)


def charge(seed: int, *unit: Any) -> Event:
    values = np.random.default_rng(seed).exponential(0.01, (5, 3))
    return IndividualCharge(*unit, values)


# Arguments of the accountant, and the n-th call of add.
CASES: dict[str, tuple[dict[str, Any], Callable[[int], list[Event]]]] = {
    "nothing": ({}, lambda n: []),
    "public": ({"adjacency": "replace_one"}, lambda n: [PublicAnswer(n), Caveat("base")]),
    "unprotected": ({}, lambda n: [UnprotectedAnswer(1), Caveat("seeded"), Caveat("shards")]),
    "losses": ({}, lambda n: [realised(n, positions=n), SCREENED, PublicAnswer(1)]),
    "the paper's losses": ({}, lambda n: [realised(n, positions=3, adjacency="add_remove")]),
    "orders": ({}, lambda n: [realised(n, orders=(2.5, 18.0))]),
    "many losses": ({}, lambda n: [realised(n, positions=1000)]),
    "a planned bound": ({}, lambda n: [RenyiBound(3.0, 0.1, 5, n, budget=100)]),
    "a published bound": ({}, lambda n: [RenyiBound(3.0, float("inf"), 5, 1, True)]),
    "no loss yet": ({}, lambda n: [realised(n, positions=0)]),
    "screenings": ({}, lambda n: [GaussianScreening(5, 1, 0.1 * n, 0.5)]),
    "clipped": ({"adjacency": "replace_one"}, lambda n: [ClippedAnswer(0.8, 1.5, 5, n, 100)]),
    "pool": ({}, lambda n: [BoundedRangeAnswer(0.1 * n, -0.25, 1 / 3, 5, n)]),
    "a planned pool": ({}, lambda n: [BoundedRangeAnswer(2.0, -0.25, 0.5, 5, n, 100)]),
    "a budget": ({"epsilon": 3.0}, lambda n: [charge(n, "zcdp", None), PublicAnswer(n)]),
    "a budget of one order": (
        {"epsilon": 12.0, "adjacency": "replace_one"},
        lambda n: [charge(n, "renyi", 4.0)],
    ),
    "a budget without a charge": ({"epsilon": 3.0}, lambda n: [PublicAnswer(n)]),
}


def accountant(case: str, **changes: Any) -> Accountant:
    """Return the accountant of a case, before its first events."""
    return Accountant(DELTA, **{**CASES[case][0], **changes})
