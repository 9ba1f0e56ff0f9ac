"""ε read off a loss distribution keeps δ at 50 digits, and is hardly above the least."""

import math

import mpmath
import numpy as np
import pytest

from adapmixed.privacy.composition import composed_epsilon
from adapmixed.privacy.costs.clipped_mixing import DominatingPair, clipped_mixing_pair
from adapmixed.privacy.loss_tail import short_interval, smallest_epsilon

DELTA = 1e-5


def exact_delta(masses, first, interval, infinite, epsilon):
    with mpmath.workdps(50):
        total = mpmath.mpf(infinite)
        for step, mass in enumerate(masses):
            loss = (first + step) * mpmath.mpf(interval)
            if loss > epsilon:
                total += mpmath.mpf(mass) * (1 - mpmath.exp(epsilon - loss))
        return total


@pytest.mark.parametrize("interval", [0.3, 1e-3, 2.0**-40, 50.0])
@pytest.mark.parametrize("delta", [0.2, 1e-5, 1e-13])
def test_delta_is_kept(interval, delta):
    interval, generator = short_interval(interval), np.random.default_rng(5)
    for first in (-7, 0, 3, 1_000_003):
        for infinite in (0.0, delta / 3, delta):
            masses = generator.dirichlet(np.full(200, 0.05)) * (1 - infinite)
            found = smallest_epsilon(masses, first, interval, infinite, delta)
            assert exact_delta(masses, first, interval, infinite, found) <= delta
            if found > 0 and infinite < delta:
                least = found * (1 - 1e-9)
                assert exact_delta(masses, first, interval, infinite, least) > delta * (1 - 1e-9)


def test_ends():
    half = np.array([0.5, 0.5])
    assert smallest_epsilon(half, -1, 0.5, 0.0, 1e-9) == 0.0
    assert smallest_epsilon(half, 1, 0.5, 1e-3, 1e-4) == math.inf
    # 2^27 steps of an interval of 27 bits would be rounded.
    assert smallest_epsilon(half, 2**27, 0.5, 0.0, 1e-4) == math.inf
    assert smallest_epsilon(np.array([0.5, math.nan]), 1, 0.5, 0.0, 1e-4) == math.inf
    with pytest.raises(ValueError, match="interval must have 26 significant bits, got 0.1"):
        smallest_epsilon(half, 1, 0.1, 0.0, 1e-4)


@pytest.mark.parametrize("value", [0.1, 1.0, 3e-12, 1e300, 0.0])
def test_intervals_of_few_digits(value):
    found = short_interval(value)
    assert value <= found <= value * (1 + 2.0**-25) and short_interval(found) == found
    for index in (2**27 - 1, 1_000_003):
        assert value > 1e290 or mpmath.mpf(found) * index == mpmath.mpf(found * index)


def composed_delta(pair: DominatingPair, queries: int, epsilon: float) -> mpmath.mpf:
    """Return δ of `queries` draws of the pair, both orders, over all counts of its atoms."""
    atoms = [(mpmath.mpf(a), mpmath.mpf(b)) for a, b in zip(pair.p, pair.q, strict=True)]
    outcomes = [(0, mpmath.mpf(1), mpmath.mpf(1))]  # drawn so far, P and Q
    for a, b in atoms[:-1]:
        outcomes = [
            (drawn + k, p * ways * a**k, q * ways * b**k)
            for drawn, p, q in outcomes
            for k in range(queries - drawn + 1)
            for ways in [math.comb(queries - drawn, k)]
        ]
    a, b = atoms[-1]
    distributions = [(p * a ** (queries - k), q * b ** (queries - k)) for k, p, q in outcomes]
    ratio = mpmath.exp(mpmath.mpf(epsilon))
    return max(
        mpmath.fsum(max(0, p - ratio * q) for p, q in distributions),
        mpmath.fsum(max(0, q - ratio * p) for p, q in distributions),
    )


@pytest.mark.parametrize(
    ("upper", "num_models", "queries", "adjacency"),
    [(8.0, 2, 8, "zero_out"), (8.0, 2, 7, "zero_out"), (6.0, 3, 6, "replace_one")],
)
@pytest.mark.slow
def test_a_wide_box_at_the_default_points(upper, num_models, queries, adjacency):
    """With 2^20 steps, losses from repeated subtraction would exceed δ by up to 1.4e-7."""
    pair = clipped_mixing_pair(math.exp(-0.01), math.exp(upper), num_models, adjacency)
    found = composed_epsilon(pair, queries, DELTA)
    with mpmath.workdps(50):
        assert DELTA * (1 - 1e-6) < composed_delta(pair, queries, found) <= DELTA
