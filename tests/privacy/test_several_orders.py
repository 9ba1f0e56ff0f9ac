"""δ split over several orders, and the ex-post statement, by enumeration."""

import math
from fractions import Fraction

import numpy as np
import pytest
from accountant_cases import DELTA, losses, random_losses

from adapmixed.privacy import Accountant
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.audit.trees import accounted, excess, two_stage_paths


def test_several_orders_split_delta():
    orders = (2.0, 6.0, 18.0, 60.0)
    for seed in range(20):
        event = random_losses(seed, orders=orders, queries=200)
        guarantee = Accountant(DELTA).add(event).guarantee()
        # The report does not pick the best order of each model afterwards for free.
        totals = event.loss.sum(axis=1)
        naive = (totals + [c_alpha(order, DELTA) for order in orders]).min(axis=1).max()
        assert guarantee.epsilon > naive + 1e-6
        split = (totals + [c_alpha(order, DELTA / 4) for order in orders]).min(axis=1).max()
        assert guarantee.epsilon == pytest.approx(split, rel=1e-6)
        assert guarantee.order in orders and guarantee.orders == orders


def test_shares_of_delta_add_up_to_no_more():
    for count in (1, 2, 3, 7, 10, 32):
        orders = tuple(2.0 + k for k in range(count))
        event = losses(np.zeros((3, 0, count)), orders)
        found = Accountant(DELTA).add(event).guarantee()
        share = DELTA if count == 1 else math.nextafter(DELTA / count, 0.0)
        assert count * Fraction(share) <= Fraction(DELTA)
        assert found.epsilon == c_alpha(orders[-1], share) and found.order == orders[-1]


def test_picking_the_best_order_afterwards_breaks_delta_and_splitting_does_not():
    orders = (8.0, 2.0)
    paths = two_stage_paths(*orders, DELTA)

    def single(column):
        def charge(history):
            return accounted([[stage[column]] for stage in history], (orders[column],), DELTA)

        return charge

    def naive(history):
        return min(single(0)(history), single(1)(history))

    assert excess(paths, naive) > 1.9 * DELTA
    for column in range(2):  # each order alone is valid, and its δ is nearly used up
        assert 0.9 * DELTA < excess(paths, single(column)) <= DELTA
    split = excess(paths, lambda history: accounted(history, orders, DELTA))
    assert 0.1 * DELTA < split <= DELTA


def test_ex_post_statement_on_random_adaptive_trees():
    """P(S) <= ∫_S e^{E + c} dQ + δ holds both ways for two adaptive stages."""
    generator, order, delta, largest = np.random.default_rng(5), 3.0, 0.05, 0.0
    for _ in range(300):
        paths = []
        p, q = generator.dirichlet(np.full(3, 0.4), 2) * 0.999 + 0.001 / 3
        for a in range(3):
            p2, q2 = generator.dirichlet(np.full(3, 0.4), 2) * 0.999 + 0.001 / 3
            stages = [
                max(
                    math.log(float(np.sum(x**order * y ** (1 - order)))) / (order - 1)
                    for x, y in ((u, v), (v, u))
                )
                for u, v in ((p, q), (p2, q2))
            ]
            paths += [(p[a] * p2[b], q[a] * q2[b], stages) for b in range(3)]

        def charge(history):
            event = losses([[[stage] for stage in history]], (order,))
            return Accountant(delta).add(event).guarantee().epsilon

        worst = excess(paths, charge)
        assert worst <= delta
        largest = max(largest, worst / delta)
    assert largest > 0.1
