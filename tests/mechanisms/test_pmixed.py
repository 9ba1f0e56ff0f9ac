"""PMixED: the sound radius and bound, and errors."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from exact import costs
from pmixed_cases import DELTA, answer, budget

from adapmixed.mechanisms import PMixED
from adapmixed.privacy import Accountant
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SecureRandom


@pytest.mark.parametrize("order,per_query", [(1.5, 1e-3), (3.0, 0.02), (6.0, 0.0078), (18.0, 0.4)])
def test_radius_spends_the_budget_and_no_more(order: float, per_query: float) -> None:
    for models in (1, 2, 80):
        mechanism = budget(order, per_query, 10)
        radius = mechanism.radius(models)
        # R = log(1 + N (e^{(order-1) eps} - 1)) / (order - 1)
        growth = models * math.expm1((order - 1) * mechanism.per_query)
        assert radius == pytest.approx(math.log1p(growth) / (order - 1), rel=1e-11)
        private, public = torch.randn(models, 2, 5), torch.randn(2, 5)
        (event,) = costs(answer(mechanism, private, public))
        assert (event.order, event.num_models, event.queries) == (order, models, 2)
        assert not event.published
        assert event.epsilon <= mechanism.per_query
        assert event.epsilon == pytest.approx(mechanism.per_query, rel=1e-9)


def test_epsilon_is_for_the_neighbours_that_were_chosen() -> None:
    """It is charged with the first query; an accountant of other neighbours is not charged."""
    logits = torch.randn(4, 1, 5), torch.randn(1, 5)
    for epsilon, adjacency in product((1.0, 8.0), ("zero_out", "replace_one")):
        mechanism = PMixED(epsilon, DELTA, 40, 20.0, adjacency=adjacency)
        accountant = Accountant(DELTA, adjacency=adjacency)
        for _ in range(40):
            accountant.charge(mechanism.propose(*logits, rng=SecureRandom()))
            assert 0.99 * epsilon < accountant.guarantee().epsilon <= epsilon
        assert accountant.guarantee().kind == "fixed" and f"ε = {epsilon:g}" in str(
            accountant.guarantee()
        )
        with pytest.raises(ValueError, match="its epsilon is for zero_out; take PMixED"):
            Accountant(DELTA, adjacency="replace_one").bind(PMixED(epsilon, DELTA, 40, 20.0), 4)
    with pytest.raises(ValueError, match="epsilon of each of two zero-outs must be > "):
        PMixED(1.0, DELTA, 40, 10.0, adjacency="replace_one")
    with pytest.raises(ValueError, match="adjacency must be"):
        PMixED(1.0, DELTA, 40, 20.0, adjacency="add_remove")


def test_no_rounding_exceeds_the_configured_epsilon() -> None:
    """One unit in the last place too much would be printed as a higher digit.

    The settings include some where the conversion takes most of epsilon.
    """
    generator = random.Random(1)
    private, public = torch.randn(3, 1, 4), torch.randn(1, 4)
    for _ in range(400):
        order = generator.choice((1.5, 2.0, 3.0, 6.0, 18.0, 64.0))
        delta, queries = 10 ** generator.uniform(-9, -1), generator.choice((1, 2, 3, 20))
        conversion = max(0.0, c_alpha(order, delta))
        more = generator.choice((1e-6, 1e-3, 0.1, 1.0))
        epsilon = round(conversion * generator.choice((1.0001, 1.1, 2.0)) + more, 4)
        if epsilon <= conversion:
            continue
        (event,) = costs(answer(PMixED(epsilon, delta, queries, order), private, public))
        for events in ([event] * queries, [replace(event, queries=queries)]):
            total = Accountant(delta).add(events).guarantee().epsilon
            assert total <= epsilon, (epsilon, delta, queries, order)
