"""Two zero-out steps in a row: ε is never below the exact optimum, and hardly above it."""

import itertools
import math

import mpmath
import pytest

from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.conversions import c_alpha, emptied_share, replace_one_epsilon

ORDERS = [1.001, 1.3, 1.7, 1.95, 2.0, 2.5, 4.0, 18.0, 1000.0]
SPENT = [0.0, 5e-324, 1e-9, 0.02, 0.3, 2.0, 50.0, 1e4]
DELTAS = [0.999, 0.3, 1e-5, 1e-12, 1e-300]


def optimum(order: float, spent: float, delta: float) -> mpmath.mpf:
    """Return 2ε₁ of the least ε₁ >= 0 with spent + c_α(δ/(1 + e^ε₁)) <= ε₁, by bisection."""
    a, b, d = mpmath.mpf(order), mpmath.mpf(spent), mpmath.mpf(delta)

    def above(e: mpmath.mpf) -> mpmath.mpf:
        share = d / (1 + mpmath.exp(e))
        return b + mpmath.log((a - 1) / a) - (mpmath.log(share) + mpmath.log(a)) / (a - 1) - e

    if above(mpmath.mpf(0)) <= 0:
        return mpmath.mpf(0)
    low, high = mpmath.mpf(0), mpmath.mpf(10) ** 5
    if a < 2:  # convex, so it only rises beyond its least point
        if a <= 1.5:
            return mpmath.inf
        high = mpmath.log((a - 1) / (2 - a))
    if above(high) > 0:
        return mpmath.inf
    for _ in range(220):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) > 0 else (low, middle)
    return 2 * high


@pytest.mark.parametrize("order", ORDERS)
def test_never_below_the_optimum_and_hardly_above_it(order: float) -> None:
    finite = 0
    for spent, delta in itertools.product(SPENT, DELTAS):
        found = replace_one_epsilon(order, spent, delta)
        with mpmath.workdps(60):
            exact = optimum(order, spent, delta)
            assert found >= exact, (spent, delta)
            if exact > 1400:  # beyond what float64 can confirm
                assert found == math.inf
                continue
            finite += 1
            if delta == 1e-300 and found > 20:  # shares that have lost digits (subnormal)
                continue
            # For the rounding of c_α, whose terms may be far larger than their sum.
            scale = 1 + spent + (abs(math.log(delta)) + found) / (order - 1)
            assert found - exact <= 1e-12 * scale, (spent, delta)
    assert finite > 4 or order < 1.5


def test_what_cannot_be_stated_is_infinite() -> None:
    assert replace_one_epsilon(18.0, math.inf, 1e-5) == math.inf
    assert replace_one_epsilon(18.0, 1e308, 1e-5) == math.inf
    assert replace_one_epsilon(18.0, 0.0, 5e-324) == math.inf


@pytest.mark.parametrize("epsilon", [0.0, 1e-300, 1e-9, 0.5, 3.0, 40.0, 699.0, 700.0])
@pytest.mark.parametrize("delta", [0.999, 1e-5, 1e-300])
def test_a_share_leaves_the_other_step_its_part(epsilon: float, delta: float) -> None:
    share = emptied_share(epsilon, delta)
    with mpmath.workdps(60):
        exact = mpmath.mpf(delta) / (1 + mpmath.exp(mpmath.mpf(epsilon)))
        assert share <= exact
        assert share >= exact * (1 - mpmath.mpf(2) ** -48) - mpmath.mpf(1e-323)
    assert emptied_share(701.0, delta) == emptied_share(math.inf, delta) == 0.0


def test_an_order_below_two_is_stated_where_it_can_be() -> None:
    """The difference of the two sides falls first and then rises, so there may be no solution."""
    stated = ShardBudget("renyi", 0.01, 1.99).epsilon(0.3, "replace_one")
    assert 0 < stated < 10
    once = 0.01 + c_alpha(1.99, emptied_share(stated / 2, 0.3))
    assert stated / 2 == pytest.approx(once, rel=1e-6)
