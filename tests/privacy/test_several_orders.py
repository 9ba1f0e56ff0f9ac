"""δ split over several orders. The audit `odometer` attacks the ex-post statement."""

import math
from fractions import Fraction

import numpy as np
import pytest
from accountant_cases import DELTA, losses, random_losses

from adapmixed.privacy import Accountant
from adapmixed.privacy.conversions import c_alpha


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
