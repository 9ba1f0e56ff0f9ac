"""Every ensemble and every neighbour over a grid of logits: what is charged covers the truth.

Each ensemble is one position of one call. The neighbours' distributions come from the mechanism.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact import costs, individual, log_probs
from mechanism_cases import (
    BASELINES,
    GRIDS,
    MECHANISMS,
    both_ways,
    everything,
    hockey_stick,
    logits,
    neighbours,
)
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.privacy import BoundedRangeAnswer, ClippedAnswer, RenyiBound
from adapmixed.privacy.costs import bounded_range_rho, clipped_mixing_pair
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import search

BOXES = [(0.6, 1.6), (0.8, 2.7), (0.3, 1.2), (0.0, 1.5), (0.9, 1.0)]
POOLS = [(-0.25, 0.5, 2.0), (-1.0, 0.25, 1.0), (0.0, 0.7, 0.5)]
EPSILONS = (0.0, 0.01, 0.1, 0.3, 1.0)

every_grid = pytest.mark.parametrize("grid", GRIDS)


def proposed(mechanism: Mechanism, private: Tensor, public: Tensor, active: int | None) -> Any:
    return mechanism.propose(private, public, rng=SeededRandom(0), active=active)


@every_grid
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.parametrize(
    ("order", "beta", "orders"),
    [(2.0, 0.05, ()), (6.0, 0.02, ()), (18.0, 0.2, ()), (6.0, 0.1, (1.5, 3.0, 18.0))],
)
def test_realised_losses_of_every_order(
    grid: str, adjacency: Any, order: float, beta: float, orders: tuple[float, ...]
) -> None:
    private, public, rows, k = everything(grid)
    mechanism = AdaPMixED(order, beta, screen=None, loss_orders=orders, adjacency=adjacency)
    event, _ = costs(proposed(mechanism, private, public, k))
    assert event.adjacency == adjacency
    here = log_probs(mechanism, private, public, active=k)
    for i, neighbour in enumerate(neighbours(private, public, adjacency, rows)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for one, charge in zip(event.orders, event.loss[i].T, strict=True):
            # float64 resolves a divergence to about 1e-14 of its logarithms.
            assert (both_ways(here, there, one).numpy() <= charge + 1e-13).all(), (grid, i)
    assert event.loss.max() > 1e-3


def stated(mechanism: Mechanism, *of: Any) -> Any:
    """Return the event of answers of a cost that is fixed in advance; None for other answers."""
    event, *more = (one for one in costs(proposed(mechanism, *of)) if one.queries)
    known = isinstance(event, RenyiBound | ClippedAnswer | BoundedRangeAnswer)
    return event if known and not more and not getattr(event, "published", False) else None


FIXED = [
    *(one for name, one in MECHANISMS.items() if name not in BASELINES),
    *(ClippedMixing(*box, queries=1) for box in BOXES),
    *(ClippedLogPool(*setting) for setting in POOLS),
    *(AdaPMixED(*of, screen=None, loss="fixed") for of in [(6.0, 0.02), (2.0, 0.2)]),
    PMixED(8.0, 1e-5, 100, 6.0),
]
EVENTS = [(one, stated(one, *logits(1), None)) for one in FIXED]
QUESTIONS = [
    pytest.param(one, way, id=f"{one.name}-{at}-{way}")
    for at, (one, event) in enumerate(EVENTS)
    for way in ("zero_out", "replace_one")
    if event and way in (getattr(event, "adjacency", way), "zero_out")
]


def test_every_planned_mechanism_is_enumerated() -> None:
    known = {one.values[0].name for one in QUESTIONS}
    assert known >= {one.name for one in FIXED if one.planned_queries} - {"pmixed-published"}


SLACK = {RenyiBound: 1e-13, BoundedRangeAnswer: 1e-14, ClippedAnswer: 1e-12}
"""What float64 does not resolve of two answers."""


def both(event: Any, here: Tensor, there: Tensor, adjacency: str) -> list[tuple[float, float]]:
    """Return what is true of two answers, and what their event states at most."""
    if isinstance(event, RenyiBound):
        return [(float(both_ways(here, there, event.order).max()), event.epsilon)]
    if isinstance(event, BoundedRangeAnswer):
        setting = event.scale, event.lower, event.upper, event.num_models, adjacency
        rho = bounded_range_rho(*setting)
        return [(float(both_ways(here, there, a).max()) / a, rho) for a in (1.5, 2.0, 9.0)]
    pair = clipped_mixing_pair(event.lower, event.upper, event.num_models, adjacency)
    p, q = np.array(pair.p), np.array(pair.q)
    return [(hockey_stick(here, there, e), search.hockey_stick(p, q, e)) for e in EPSILONS]


@every_grid
@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize(("mechanism", "adjacency"), QUESTIONS)
def test_a_fixed_cost(grid: str, missing: int, mechanism: Mechanism, adjacency: str) -> None:
    """Also with members that are missing in both ensembles."""
    present, public, rows, k = everything(grid)
    absent = public.expand(missing, -1, -1)
    private = torch.cat([present, absent])
    event = stated(mechanism, private, public, k)
    here = log_probs(mechanism, private, public, active=k)
    found = []
    for neighbour in neighbours(present, public, adjacency, rows):
        there = log_probs(mechanism, torch.cat([neighbour, absent]), public, active=k)
        found += both(event, here, there, adjacency)
    assert all(true <= most + SLACK[type(event)] for true, most in found)
    assert max(true for true, _ in found) >= 0.05 * max(most for _, most in found)


@every_grid
@pytest.mark.parametrize(
    "mechanism",
    [
        *(ClippedMixing(max(c, 1e-5), u, order=a) for c, u in BOXES for a in (2.0, 6.5)),
        *(ClippedLogPool(*setting) for setting in POOLS),
    ],
)
def test_an_emptied_member_costs_at_most_its_own_charge(grid: str, mechanism: Any) -> None:
    private, public, rows, k = everything(grid)
    charges = torch.from_numpy(individual(proposed(mechanism, private, public, k)))
    here, boxed = log_probs(mechanism, private, public, active=k), mechanism.measure[1]
    for i, neighbour in enumerate(neighbours(private, public, "zero_out", rows)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for order in [boxed] if boxed else [2.0, 9.0]:
            true = both_ways(here, there, order) / (1.0 if boxed else order)
            assert bool((true <= charges[i] + 1e-13).all())
    if not boxed:
        setting = mechanism.scale, mechanism.lower, mechanism.upper, len(private), "zero_out"
        assert float(charges.max()) <= bounded_range_rho(*setting) * (1 + 1e-6)
        return
    # For an emptied shard: "Rounding" in docs/theory/per-shard-budgets.md, e₀ = 4e-12.
    least = (2 * boxed - 1) / (boxed - 1) * (4 * 4e-12 + len(private) * 2.0**-52)
    emptied = charges[:, (private == public).all(2).all(0)]
    assert bool(((emptied >= least) & (emptied <= least * (1 + 1e-12))).all())
    assert emptied.numel() > 0
