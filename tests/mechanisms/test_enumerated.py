"""Every ensemble and every neighbour over a grid of logits on two and three tokens.

Each ensemble is one position of one call. The neighbours' distributions come from the mechanism.
"""

from itertools import product

import pytest
import torch
from exact import costs, log_probs, stated
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, PMixED
from adapmixed.privacy import LeaveOneOutLoss, RenyiBound
from adapmixed.privacy.costs.pmixed import sound_bound
from adapmixed.rng import SeededRandom

GRIDS = {
    # tokens, models, values of a logit: all (models + 1) rows over all values
    "V2-N1": (2, 1, (-40.0, -3.0, 0.0, 0.5, 3.0)),
    "V2-N2": (2, 2, (-3.0, 0.0, 0.5, 3.0)),
    "V2-N3": (2, 3, (-3.0, 0.0, 3.0)),
    "V3-N2": (3, 2, (-2.0, 0.0, 4.0)),
    "tail": (3, 2, (-90.0, 0.0, 90.0)),  # tokens about which no member speaks
    "active": (4, 2, (-2.0, 3.0)),  # with K = 2 of 4 tokens
}
ACTIVE = {"active": 2}


def everything(vocab: int, models: int, values: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Return private (N, B, V) and public (B, V) logits: all rows of all members, first logit 0.

    A fixed first logit loses no distribution, because only differences count.
    """
    rows = [(0.0, *rest) for rest in product(values, repeat=vocab - 1)]
    ensembles = torch.tensor(list(product(rows, repeat=models + 1)))
    return ensembles[:, 1:].transpose(0, 1).contiguous(), ensembles[:, 0].contiguous()


def both_ways(p: Tensor, q: Tensor, order: float) -> Tensor:
    forward = torch.logsumexp(order * p + (1 - order) * q, 1) / (order - 1)
    backward = torch.logsumexp(order * q + (1 - order) * p, 1) / (order - 1)
    return torch.maximum(forward, backward)


def neighbours(private: Tensor, public: Tensor, adjacency: str) -> list[tuple[Tensor, Tensor]]:
    result = []
    for i in range(len(private)):
        if adjacency == "zero_out":
            emptied = private.clone()
            emptied[i] = public
            result.append((emptied, public))
        else:
            others = torch.cat((private[:i], private[i + 1 :]))
            result.append((others if len(others) else public[None], public))
    return result


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.parametrize(("order", "beta"), [(2.0, 0.05), (6.0, 0.02), (18.0, 0.2)])
def test_no_neighbour_costs_more_than_its_charge(
    grid: str, adjacency: str, order: float, beta: float
) -> None:
    (private, public), k = everything(*GRIDS[grid]), ACTIVE.get(grid)
    mechanism = AdaPMixED(order, beta, screen=None, adjacency=adjacency)
    proposal = mechanism.propose(private, public, rng=SeededRandom(0), active=k)
    (event,) = [one for one in stated(proposal) if isinstance(one, LeaveOneOutLoss)]
    charge = torch.from_numpy(event.loss.copy())[:, :, 0]
    here = log_probs(mechanism, private, public, active=k)
    for i, neighbour in enumerate(neighbours(private, public, adjacency)):
        true = both_ways(here, log_probs(mechanism, *neighbour, active=k), order)
        # float64 resolves a divergence to about 1e-14 of its logarithms.
        assert bool((true <= charge[i] + 1e-13).all()), (grid, i)
    assert float(charge.max()) > 1e-3


@pytest.mark.parametrize("grid", GRIDS)
def test_no_neighbour_costs_more_than_the_fixed_bound(grid: str) -> None:
    (private, public), k = everything(*GRIDS[grid]), ACTIVE.get(grid)
    mechanism = PMixED(8.0, 1e-5, len(public), 6.0)
    (event,) = costs(mechanism.propose(private, public, rng=SeededRandom(0), active=k))
    assert isinstance(event, RenyiBound)
    radius = mechanism.radius(len(private))
    assert event.epsilon == sound_bound(6.0, radius, len(private))
    here = log_probs(mechanism, private, public, active=k)
    worst = 0.0
    for neighbour in neighbours(private, public, "zero_out"):
        true = both_ways(here, log_probs(mechanism, *neighbour, active=k), 6.0)
        worst = max(worst, float(true.max()))
    assert 0 < worst <= event.epsilon + 1e-13
