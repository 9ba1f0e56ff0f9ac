"""Every ensemble and every neighbour over a grid of logits: what is charged covers the truth.

Each ensemble is one position of one call. The neighbours' distributions come from the mechanism.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from exact import costs, individual, log_probs, losses
from mechanism_cases import GRIDS, both_ways, everything, hockey_stick, neighbours
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.privacy import RenyiBound
from adapmixed.privacy.costs import bounded_range_rho, clipped_mixing_pair, sound_bound
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import search

BOXES = [(0.6, 1.6), (0.8, 2.7), (0.3, 1.2), (0.0, 1.5), (0.9, 1.0)]
POOLS = [(-0.25, 0.5, 2.0), (-1.0, 0.25, 1.0), (0.0, 0.7, 0.5)]
EPSILONS = (0.0, 0.01, 0.1, 0.3, 1.0)

every_grid = pytest.mark.parametrize("grid", GRIDS)
every_question = pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])


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
    charge = losses(proposed(mechanism, private, public, k))
    here = log_probs(mechanism, private, public, active=k)
    for i, neighbour in enumerate(neighbours(private, public, adjacency, rows)):
        there = log_probs(mechanism, neighbour, public, active=k)
        for at, one in enumerate(orders or (order,)):
            # float64 resolves a divergence to about 1e-14 of its logarithms.
            assert bool((both_ways(here, there, one) <= charge[i, :, at] + 1e-13).all()), (grid, i)
    assert float(charge.max()) > 1e-3


@every_grid
@pytest.mark.parametrize(
    "mechanism",
    [
        PMixED(8.0, 1e-5, 100, 6.0),
        AdaPMixED(6.0, 0.02, screen=None, loss="fixed"),
        AdaPMixED(2.0, 0.2, screen=None, loss="fixed"),
    ],
)
def test_fixed_bounds(grid: str, mechanism: Any) -> None:
    private, public, rows, k = everything(grid)
    event, order = costs(proposed(mechanism, private, public, k))[0], mechanism.order
    radius = (
        mechanism.radius if isinstance(mechanism, AdaPMixED) else mechanism.radius(len(private))
    )
    assert isinstance(event, RenyiBound)
    assert event.epsilon == sound_bound(order, radius, len(private))
    here = log_probs(mechanism, private, public, active=k)
    worst = 0.0
    for neighbour in neighbours(private, public, "zero_out", rows):
        true = both_ways(here, log_probs(mechanism, neighbour, public, active=k), order)
        worst = max(worst, float(true.max()))
    assert 0 < worst <= event.epsilon + 1e-13


@every_grid
@every_question
@pytest.mark.parametrize("box", BOXES)
def test_the_pair_of_a_box(grid: str, adjacency: str, box: tuple[float, float]) -> None:
    private, public, rows, k = everything(grid)
    mechanism = ClippedMixing(*box, queries=len(public))
    pair = clipped_mixing_pair(*box, len(private), adjacency)
    p, q = np.array(pair.p), np.array(pair.q)
    here = log_probs(mechanism, private, public, active=k)
    for neighbour in neighbours(private, public, adjacency, rows):
        there = log_probs(mechanism, neighbour, public, active=k)
        for epsilon in EPSILONS:
            assert hockey_stick(here, there, epsilon) <= search.hockey_stick(p, q, epsilon) + 1e-12


@every_grid
@every_question
@pytest.mark.parametrize("setting", POOLS)
@pytest.mark.parametrize("missing", [0, 3])
def test_the_range_of_a_pool(
    grid: str, adjacency: str, setting: tuple[float, float, float], missing: int
) -> None:
    """Also with members that are missing in both ensembles."""
    private, public, rows, k = everything(grid)
    present, models = private, len(private) + missing
    private = torch.cat([private, public.expand(missing, -1, -1)])
    lower, upper, scale = setting
    mechanism = ClippedLogPool(*setting)
    rho = bounded_range_rho(scale, lower, upper, models, adjacency)
    here, worst = log_probs(mechanism, private, public, active=k), 0.0
    for neighbour in neighbours(present, public, adjacency, rows):
        neighbour = torch.cat([neighbour, private[len(present) :]])
        there = log_probs(mechanism, neighbour, public, active=k)
        worst = max(worst, *(float(both_ways(here, there, a).max()) / a for a in (1.5, 2.0, 9.0)))
    assert 0.05 * rho < worst <= rho + 1e-14


@pytest.mark.parametrize("grid", ["V2-N2", "V2-N3", "V3-N2"])
def test_a_mean_over_those_that_are_there_would_cost_more(grid: str) -> None:
    """So N is a constant, and a missing member answers q."""
    private, public, rows, _ = everything(grid)
    pool, box = ClippedLogPool(*POOLS[0]), ClippedMixing(0.6, 1.6, queries=1)
    others = neighbours(private, public, "add_remove", rows)
    here = log_probs(pool, private, public)
    worst = max(
        float(both_ways(here, log_probs(pool, one, public), a).max()) / a
        for one in others
        for a in (1.5, 2.0, 9.0)
    )
    assert worst > 1.5 * bounded_range_rho(2.0, -0.25, 0.5, len(private), "zero_out")
    pair = clipped_mixing_pair(0.6, 1.6, len(private), "zero_out")
    bound = search.hockey_stick(np.array(pair.p), np.array(pair.q), 0.0)
    there = log_probs(box, others[0], public)
    assert hockey_stick(log_probs(box, private, public), there, 0.0) > 1.2 * bound


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
