"""Sums and multiples are rounded up, and ε covers the masses' rounding, by exact rationals."""

import math
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest

from adapmixed.limits import QUESTIONS
from adapmixed.privacy import (
    Accountant,
    GaussianScreening,
    RenyiBound,
)
from adapmixed.privacy.composition import composed_epsilon
from adapmixed.privacy.conversions import add_up, times_up
from adapmixed.privacy.costs import accounted_box, clipped_mixing_pair, screening_rho

TINY, LARGE = math.ulp(0.0), sys.float_info.max
ENDS = [0.0, TINY, sys.float_info.min, 2.0**-53, 1.0, 1 + 2.0**-52, 3.0, 2.0**53 + 2, LARGE]


def numbers(count):
    generator = np.random.default_rng(2)
    free = generator.random(count) * 2.0 ** generator.integers(-60, 60, count)
    return [*ENDS, *free.tolist()]


def exact_pair(lower, upper, num_models, adjacency):
    """Return the atoms (P, Q) of docs/theory/clipped-mixing.md in rationals."""
    low, high, models = Fraction(lower), Fraction(upper), Fraction(num_models)
    raised, lowered = (1 - low) / (high - low), (high - 1) / (high - low)
    less, corner = min(raised, lowered), low if high + low >= 2 else high
    corners = [(high, low, less), (low, high, less), (corner, corner, 1 - 2 * less)]
    if adjacency == "zero_out":
        corners = [(high, Fraction(1), raised), (low, Fraction(1), lowered)]
    base, common = (models - 1) * low, (models - 1) * (1 - low) / models
    atoms = [((base + u) / models * m, (base + w) / models * m) for u, w, m in corners]
    return [*atoms, (common, common)]


def two_above(exact):
    """Return the second float above an exact value, the largest result that is allowed."""
    if exact > Fraction(LARGE):
        return math.inf
    return math.nextafter(math.nextafter(float(exact), math.inf), math.inf)


def test_a_sum_is_never_below_the_exact_one():
    values = numbers(60)
    for a in values:
        for b, found in zip(values, add_up(a, values).tolist(), strict=True):
            exact = Fraction(a) + Fraction(b)
            assert found == math.inf or Fraction(found) >= exact
            assert found <= two_above(exact)
            if 0 in (a, b):
                assert found == a + b


def test_a_multiple_is_never_below_the_exact_one():
    values = numbers(60)
    for count in [0, 1, 2, 3, 7, 508, 99_840, 2**40 + 1, 1.1, 18.0, 1e-3]:
        for cost in values:
            exact, found = Fraction(count) * Fraction(cost), times_up(count, cost)
            assert found == math.inf or Fraction(found) >= exact
            assert found <= two_above(exact)
            if count in (0, 1):
                assert found == count * cost
        assert times_up(count, math.inf) == (math.inf if count else 0.0)


def test_every_part_of_a_total_is_rounded_up():
    bound = [GaussianScreening(7, 3, 0.1, 0.3), RenyiBound(3.3, 0.1, 7, 3)]
    parts = Accountant(1e-5).add(bound).breakdown()
    assert Fraction(parts["mixing"]) >= 3 * Fraction(0.1)
    assert Fraction(parts["screening"]) >= Fraction(3.3) * 3 * Fraction(screening_rho(0.1, 0.3, 7))


@pytest.mark.parametrize("adjacency", QUESTIONS)
def test_masses_are_within_what_is_allowed_for_them(adjacency):
    """The error is at most 2^-49 of every mass, also for narrow boxes.

    See "How ε is computed" in docs/theory/clipped-mixing.md.
    """
    generator = np.random.default_rng(6)
    for step in range(600):
        size, models = 10.0 ** generator.uniform(-9, 0), int(generator.integers(1, 1000))
        skew = 10.0 ** generator.uniform(-2, 2) if step % 3 else 1 + 1e-3 * generator.uniform(-1, 1)
        lower, upper = max(0.0, 1 - size), 1 + size * skew
        lower, models = (lower, models) if step % 5 else (0.0, 1 + step % 3)
        pair = clipped_mixing_pair(lower, upper, models, adjacency)
        exact = [atom for atom in exact_pair(lower, upper, models, adjacency) if any(atom)]
        for atom, found in zip(exact, zip(pair.p, pair.q, strict=True), strict=True):
            for mass, approximate in zip(atom, found, strict=True):
                assert abs(Fraction(approximate) - mass) <= mass * Fraction(2.0**-49)


def exact_largest_loss(*setting):
    """Return max |log(p/q)| of the exact pair."""
    with mpmath.workdps(60):
        ratios = [a / b for a, b in exact_pair(*setting)]
        return max(
            abs(mpmath.log(mpmath.mpf(r.numerator) / mpmath.mpf(r.denominator))) for r in ratios
        )


@pytest.mark.parametrize("adjacency", QUESTIONS)
def test_what_the_masses_lost_is_in_the_epsilon(adjacency):
    """At a δ below every mass, ε is T times the exact pair's largest loss.

    The floats of the pair alone would state less.
    """
    short = 0
    for step in range(1, 60):
        size, models, queries = 1e-9 * 1.7**step, 2 + step % 7, 1 + step % 3
        if size > 0.5:
            break
        box = accounted_box(1 - size, 1 + 1.5 * size)
        pair = clipped_mixing_pair(*box, models, adjacency)
        exact = queries * exact_largest_loss(*box, models, adjacency)
        found = composed_epsilon(pair, queries, 1e-300, points=64)
        assert found >= exact * (1 - mpmath.mpf(10) ** -200)
        assert found <= exact * (1 + 2.0**-39) + queries * 2.0**-46
        short += queries * pair.largest_loss() < exact
    assert short > 3  # pairs whose floats alone would state too little
