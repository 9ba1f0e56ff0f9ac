"""AdaPMixED's charge for a model covers the true effect of that model's removal.

The mechanism runs on the ensemble and on every neighbour. The true divergence of the two
distributions is computed with 60 digits from the weights of both answers.
"""

from __future__ import annotations

from itertools import islice

import mpmath
import pytest
import torch
from exact import (
    both_ways,
    costs,
    cover,
    losses,
    mean,
    members,
    mpf,
    random_ensembles,
)
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, Ticket
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

ORDERS = (1.01, 1.5, 2.0, 3.0, 6.0, 18.0, 64.0)


def answer(mechanism: AdaPMixED, private: Tensor, public: Tensor) -> list[mpmath.mpf]:
    proposal = mechanism.propose(private, public, rng=SeededRandom(0))
    return mean(members(proposal, 0)[0])


def neighbour(mechanism: AdaPMixED, private: Tensor, public: Tensor, i: int) -> list[mpmath.mpf]:
    """Return the answer without member i, which is removed or answers the public logits."""
    if mechanism.adjacency == "zero_out":
        emptied = private.clone()
        emptied[i] = public
        return answer(mechanism, emptied, public)
    others = private[[j for j in range(len(private)) if j != i]]
    # An ensemble that has lost its only model is the public one.
    return answer(mechanism, others if len(others) else public[None], public)


def test_every_order_of_loss_orders_is_covered() -> None:
    orders = (1.5, 3.0, 18.0)
    for private, public in islice(random_ensembles(6), 60):
        mechanism = AdaPMixED(6.0, 0.1, screen=None, loss_orders=orders, adjacency="add_remove")
        charges = losses(mechanism.propose(private, public, rng=SeededRandom(0)))
        here = answer(mechanism, private, public)
        for i in range(len(private)):
            there = neighbour(mechanism, private, public, i)
            for k, order in enumerate(orders):
                true = both_ways(here, there, order)
                assert true <= mpf(cover(float(charges[i, 0, k])))


def test_identical_models_cost_next_to_nothing() -> None:
    """Losses are bounds on what floats do not see, and those of emptied members are exactly 0."""
    public = torch.randn(20, 9, generator=torch.Generator().manual_seed(1))
    private = (public + torch.randn(20, 9, generator=torch.Generator().manual_seed(2))).expand(
        5, 20, 9
    )
    mechanism = AdaPMixED(18.0, 0.2, screen=None, adjacency="add_remove")
    proposal = mechanism.propose(private, public, rng=SeededRandom(0))
    accountant = Accountant(1e-5)
    accountant.charge(proposal)
    assert accountant.breakdown()["mixing"] <= 20e-12
    emptied = AdaPMixED(18.0, 0.2, screen=None).propose(
        public.expand(5, 20, 9), public, rng=SeededRandom(0)
    )
    assert not bool(losses(emptied).any())


@pytest.mark.parametrize("beta", [pytest.param(0.01, marks=pytest.mark.slow), 0.2])
def test_fixed_loss_covers_every_emptied_member(beta: float) -> None:
    for turn, (private, public) in enumerate(islice(random_ensembles(7), 250)):
        order = ORDERS[turn % 6]  # at 64 the ball of β = 0.2 is beyond the limit
        mechanism = AdaPMixED(order, beta, screen=None, loss="fixed")
        (event,) = costs(mechanism.propose(private, public, rng=SeededRandom(0)))
        here = answer(mechanism, private, public)
        for i in range(len(private)):
            true = both_ways(here, neighbour(mechanism, private, public, i), order)
            assert true <= mpf(event.epsilon), (turn, i)


def weights(proposal: Ticket) -> torch.Tensor:
    return proposal._proposed.projection.weight


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_a_batch_charges_each_position_for_itself(adjacency: str) -> None:
    """Losses and answers of a position do not depend on what else is in the batch."""
    generator = torch.Generator().manual_seed(3)
    public = torch.randn(7, 4, generator=generator)
    private = public + torch.randn(3, 7, 4, generator=generator)
    mechanism = AdaPMixED(3.0, 0.05, screen=None, adjacency=adjacency)
    together = mechanism.propose(private, public, rng=SeededRandom(0))
    for b in range(7):
        alone = mechanism.propose(private[:, b : b + 1], public[b : b + 1], rng=SeededRandom(0))
        assert torch.equal(losses(alone)[:, 0], losses(together)[:, b])
        assert torch.equal(weights(alone)[:, 0], weights(together)[:, b])


def test_a_models_weight_does_not_depend_on_the_others() -> None:
    """Otherwise the removal of a member would change the others, and the charge would be wrong."""
    for private, public in islice(random_ensembles(8), 60):
        mechanism = AdaPMixED(6.0, 0.05, screen=None)
        together = weights(mechanism.propose(private, public, rng=SeededRandom(0)))
        for i in range(len(private)):
            alone = mechanism.propose(private[i : i + 1], public, rng=SeededRandom(0))
            assert torch.equal(weights(alone)[0], together[i])
