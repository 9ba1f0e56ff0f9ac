"""Conversions to (ε, δ) against exact rationals and 60 digits; each errs on its safe side."""

import itertools
import math
import sys
from fractions import Fraction
from functools import partial

import mpmath
import numpy as np
import pytest
from exact import exactly
from privacy_cases import gaussian_delta

from adapmixed.privacy.conversions import (
    add_up,
    c_alpha,
    emptied_share,
    gdp_to_dp,
    rdp_to_dp,
    replace_one_epsilon,
    times_up,
    zcdp_to_dp,
)

TINY, LARGE = math.ulp(0.0), sys.float_info.max
ENDS = [0.0, TINY, sys.float_info.min, 2.0**-53, 1.0, 1 + 2.0**-52, 3.0, 2.0**53 + 2, LARGE]


def numbers(count):
    generator = np.random.default_rng(2)
    free = generator.random(count) * 2.0 ** generator.integers(-60, 60, count)
    return [*ENDS, *free.tolist()]


def two_above(exact):
    """Return the second float above an exact value, the largest result that is allowed."""
    if exact > Fraction(LARGE):
        return math.inf
    return math.nextafter(math.nextafter(float(exact), math.inf), math.inf)


def test_a_sum_is_never_below_the_exact_one():
    values = numbers(60)
    for a in values:
        for b, total in zip(values, add_up(a, values).tolist(), strict=True):
            exact = Fraction(a) + Fraction(b)
            assert total == math.inf or Fraction(total) >= exact
            assert total <= two_above(exact)
            if 0 in (a, b):
                assert total == a + b


def test_a_multiple_is_never_below_the_exact_one():
    values = numbers(60)
    for count in [0, 1, 2, 3, 7, 508, 99_840, 2**40 + 1, 1.1, 18.0, 1e-3]:
        for cost in values:
            exact, product = Fraction(count) * Fraction(cost), times_up(count, cost)
            assert product == math.inf or Fraction(product) >= exact
            assert product <= two_above(exact)
            if count in (0, 1):
                assert product == count * cost
        assert times_up(count, math.inf) == (math.inf if count else 0.0)


@pytest.mark.parametrize("order", [1 + 1e-9, 1.01, 1.5, 2.0, 3.0, 18.0, 123.4, 1e6])
@pytest.mark.parametrize("delta", [0.9, 0.1, 1e-5, 1e-12, 1e-300])
def test_c_alpha_is_just_above_the_exact_value(order, delta):
    def formula():
        a, d = mpmath.mpf(order), mpmath.mpf(delta)
        return mpmath.log((a - 1) / a) - (mpmath.log(d) + mpmath.log(a)) / (a - 1)

    exact, value = exactly(formula), c_alpha(order, delta)
    scale = 1 + (abs(math.log(delta)) + math.log(order)) / (order - 1)
    assert 0 <= value - exact <= 1e-13 * scale + 1e-12 * abs(float(exact))


def test_c_alpha_of_the_paper():
    assert c_alpha(18, 1e-5) == pytest.approx(0.45005, abs=5e-6)
    assert c_alpha(2, 0.9) < 0  # the cost of a large delta may be negative ...
    assert rdp_to_dp(2, 0.01, 0.9) == 0.0  # ... the statement is not
    assert rdp_to_dp(18, math.inf, 1e-5) == zcdp_to_dp(math.inf, 1e-5) == math.inf


def test_zcdp_conversion_finds_the_best_order():
    for rho, delta in itertools.product([1e-8, 9.7e-5, 0.1, 30.0], [1e-5, 1e-9]):

        def cost(position, rho=rho, delta=delta):
            order = 1 + mpmath.exp(position)
            return order * rho + mpmath.log1p(-1 / order) - mpmath.log(delta * order) / (order - 1)

        near = min(np.arange(-6.0, 25.0, 0.1), key=cost)
        with mpmath.workdps(60):
            least = cost(mpmath.findroot(partial(mpmath.diff, cost), near))
        assert least <= zcdp_to_dp(rho, delta) <= least * (1 + 1e-9)
    assert zcdp_to_dp(0.0, 1e-5) == 0.0


# μ-Gaussian DP


@pytest.mark.parametrize("delta", [0.3, 1e-2, 1e-5, 1e-9, 1e-15])
@pytest.mark.parametrize("mu", [1e-3, 0.03, 0.3, 1.0, 4.0, 12.0, 25.0])
def test_epsilon_of_gaussian_dp_keeps_delta_and_little_less_does_not(mu, delta):
    epsilon = gdp_to_dp(mu, delta)
    assert gaussian_delta(mu, epsilon) <= delta and (epsilon < math.inf or mu > 20)
    if 0 < epsilon < math.inf:
        assert gaussian_delta(mu, epsilon * (1 - 1e-6)) > delta


def test_gaussian_dp_where_doubles_end():
    for mu, delta in ((31.88, 9.8e-10), (29.04, 2.7e-21), (23.67, 4.9e-50), (3.893, 8e-295)):
        epsilon = gdp_to_dp(mu, delta)
        assert epsilon == math.inf or gaussian_delta(mu, epsilon) <= delta
    assert gdp_to_dp(0.0, 1e-5) == 0.0 and gdp_to_dp(math.inf, 1e-5) == math.inf
    # δ(0) = 2 Φ(μ/2) - 1 is about 0.4 μ.
    assert gdp_to_dp(1e-6, 1e-5) == 0.0 < gdp_to_dp(1e-4, 1e-5)
    # δ is lost in the rounding of two nearly equal terms: a larger ε is stated.
    assert gaussian_delta(1e-15, gdp_to_dp(1e-15, 1e-17)) <= 1e-17


# Replace-one: two zero-out steps in a row

SPENT = [0.0, 5e-324, 1e-9, 0.02, 0.3, 2.0, 50.0, 1e4]
DELTAS = [0.999, 0.3, 1e-5, 1e-12, 1e-300]


def optimum(order, spent, delta):
    """Return 2ε₁ of the least ε₁ >= 0 with spent + c_α(δ/(1 + e^ε₁)) <= ε₁, by bisection."""
    a, b, d = mpmath.mpf(order), mpmath.mpf(spent), mpmath.mpf(delta)

    def above(e):
        share = d / (1 + mpmath.exp(e))
        return b + mpmath.log((a - 1) / a) - (mpmath.log(share) + mpmath.log(a)) / (a - 1) - e

    if above(mpmath.mpf(0)) <= 0:
        return mpmath.mpf(0)
    low, high = mpmath.mpf(0), mpmath.mpf(10) ** 5
    if a < 2:  # convex, so it only rises beyond its least point
        high = mpmath.log((a - 1) / (2 - a)) if a > 1.5 else low
    if above(high) > 0:
        return mpmath.inf
    for _ in range(220):
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) > 0 else (low, middle)
    return 2 * high


@pytest.mark.parametrize("order", [1.001, 1.3, 1.7, 1.95, 2.0, 2.5, 4.0, 18.0, 1000.0])
def test_replace_one_is_never_below_the_optimum_and_hardly_above_it(order):
    finite = 0
    for spent, delta in itertools.product(SPENT, DELTAS):
        epsilon = replace_one_epsilon(order, spent, delta)
        with mpmath.workdps(60):
            exact = optimum(order, spent, delta)
            assert epsilon >= exact, (spent, delta)
            if exact > 1400:  # beyond what float64 can confirm
                assert epsilon == math.inf
                continue
            finite += 1
            if delta == 1e-300 and epsilon > 20:  # shares that have lost digits (subnormal)
                continue
            # For the rounding of c_α, whose terms may be far larger than their sum.
            scale = 1 + spent + (abs(math.log(delta)) + epsilon) / (order - 1)
            assert epsilon - exact <= 1e-12 * scale, (spent, delta)
    assert finite > 4 or order < 1.5
    for spent, delta in ((math.inf, 1e-5), (1e308, 1e-5), (0.0, 5e-324)):
        assert replace_one_epsilon(order, spent, delta) == math.inf


@pytest.mark.parametrize("epsilon", [0.0, 1e-300, 1e-9, 0.5, 3.0, 40.0, 699.0, 700.0])
@pytest.mark.parametrize("delta", [0.999, 1e-5, 1e-300])
def test_a_share_leaves_the_other_step_its_part(epsilon, delta):
    share = emptied_share(epsilon, delta)
    with mpmath.workdps(60):
        exact = mpmath.mpf(delta) / (1 + mpmath.exp(mpmath.mpf(epsilon)))
        assert exact * (1 - mpmath.mpf(2) ** -48) - mpmath.mpf(1e-323) <= share <= exact
    assert emptied_share(701.0, delta) == emptied_share(math.inf, delta) == 0.0
