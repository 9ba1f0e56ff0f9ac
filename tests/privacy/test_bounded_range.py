"""Composition of answers of bounded range: exact adversaries, both lemmas, and the optimum."""

import itertools
import math

import mpmath
import numpy as np
import pytest

from adapmixed.privacy.bounded_range import FEW, adaptive_epsilon, bounded_range_epsilon
from adapmixed.privacy.conversions import zcdp_to_dp
from adapmixed.privacy.gaussian import gdp_to_dp

DELTA = 1e-5


def upward(x, span):
    """Return the probability under Q of a step up to e^x; it goes down to e^(x - span) else."""
    return -math.expm1(x - span) / (math.exp(x) - math.exp(x - span))


def grid_price(span, queries, cells):
    """Return log m and the best price that an adversary with steps x on a grid can reach.

    It is a lower bound of the optimum, without any error of interpolation.
    """
    reach = cells * queries
    position = np.arange(-reach, reach + 1)
    price = np.maximum(np.expm1(position * span / cells), 0.0)
    odds = [upward(span * k / cells, span) for k in range(1, cells)]
    for _ in range(queries):
        wide = np.concatenate([np.zeros(cells), price])
        top = price[-1] + np.exp(reach * span / cells) * np.expm1(
            np.arange(1, cells + 1) * span / cells
        )
        wide = np.concatenate([wide, top])
        best = price
        for k, odd in enumerate(odds, 1):
            up = wide[cells + k : cells + k + len(price)]
            best = np.maximum(best, odd * up + (1 - odd) * wide[k : k + len(price)])
        price = best
    return position * span / cells, price


def grid_delta(span, queries, epsilon, cells=32):
    """Return a lower bound of the optimum's δ at the next grid point above ε."""
    position, price = grid_price(span, queries, cells)
    at = int(np.searchsorted(-position[::-1], epsilon))
    at = len(position) - 1 - at
    return price[at] / math.exp(position[at])


@pytest.mark.parametrize("span", [1e-3, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 16, 40])
def test_no_adversary_of_a_grid_passes_delta(span, queries):
    for delta in (1e-2, 1e-5, 1e-8):
        stated = bounded_range_epsilon(span, queries, delta)
        assert grid_delta(span, queries, stated) <= delta


@pytest.mark.parametrize("span", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("queries", [16, 64, 256])
def test_few_answers_are_priced_within_two_percent_of_the_optimum(span, queries):
    stated = bounded_range_epsilon(span, queries, DELTA)
    assert grid_delta(span, queries, stated / 1.02, cells=16) > DELTA


@pytest.mark.parametrize("span", [1e-9, 0.02, 0.7, 5.0])
def test_one_answer_against_its_closed_form(span):
    for share in (0.05, 1e-3, 1e-6):
        delta = share * min(span, 1.0)
        stated = bounded_range_epsilon(span, 1, delta)
        with mpmath.workdps(40):
            exact = span + 2 * mpmath.log1p(-mpmath.sqrt(-delta * mpmath.expm1(-span)))
        assert exact <= stated <= exact * 1.01


@pytest.mark.parametrize("span", [0.01, 0.1])
@pytest.mark.parametrize(("queries", "cells"), [(FEW + 1, 8), (1024, 6), (4096, 4)])
def test_many_answers_are_priced_within_two_percent_of_the_optimum(span, queries, cells):
    stated = bounded_range_epsilon(span, queries, DELTA)
    delta = grid_delta(span, queries, stated / 1.02, cells)
    assert delta > DELTA >= grid_delta(span, queries, stated, cells)


@pytest.mark.parametrize("queries", [16, 100, FEW])
def test_the_theorem_covers_the_optimum(queries):
    for span in (0.01, 0.2, 1.0):
        rho = span**2 / 8
        optimum = bounded_range_epsilon(span, queries, DELTA)
        assert optimum <= bounded_range_epsilon(span, queries, DELTA, few=0)
        theorem = min(adaptive_epsilon(queries * rho, rho, DELTA), queries * span)
        found = bounded_range_epsilon(span, queries, DELTA, few=0)
        assert found == pytest.approx(theorem, rel=1e-12)


def random_tree(rng, vocab, depth, budget):
    """Return the leaves' probabilities under P and Q of a random adaptive history.

    Ranges depend on earlier answers; Σ η² <= budget on every path.
    """
    if depth == 0:
        return np.ones(1), np.ones(1)
    share = budget * rng.choice([0.0, 0.3, 1.0 / depth, 1.0])
    ratio = rng.uniform(0, 1, vocab)
    ratio = (ratio - ratio.min()) / np.ptp(ratio) * math.sqrt(share)
    q = rng.dirichlet(np.full(vocab, rng.choice([0.1, 1.0])))
    p = q * np.exp(ratio)
    p /= p.sum()
    below = [random_tree(rng, vocab, depth - 1, budget - share) for _ in range(vocab)]
    return tuple(
        np.concatenate([mass * leaf[side] for mass, leaf in zip(row, below, strict=True)])
        for side, row in enumerate((p, q))
    )


@pytest.mark.parametrize("seed", range(30))
def test_no_tree_of_chosen_ranges_passes_delta(seed):
    rng = np.random.default_rng(seed)
    budget, depth = rng.choice([0.5, 4.0, 30.0]), int(rng.integers(1, 6))
    p, q = random_tree(rng, 3, depth, budget)
    for delta in (0.2, 0.01, 1e-4):
        epsilon = adaptive_epsilon(budget / 8, budget / 8, delta)
        for one, other in ((p, q), (q, p)):
            assert np.maximum(one - math.exp(epsilon) * other, 0).sum() <= delta * (1 + 1e-9)


def price(m, r):
    """Return E (m L(r) - 1)_+ for L lognormal with mean 1 and variance r of its logarithm."""
    m, r = mpmath.mpf(m), mpmath.mpf(r)
    root = mpmath.sqrt(r)
    first, second = ((mpmath.log(m) + sign * r / 2) / root for sign in (1, -1))
    return m * mpmath.ncdf(first) - mpmath.ncdf(second)


def test_a_step_costs_no_more_than_the_first_lemma_says():
    with mpmath.workdps(40):
        for span, ratio in itertools.product((0.01, 0.3, 2.0), (1.05, 1.6, 2.5, 10, 300)):
            h = mpmath.mpf(span) ** 2 / 4
            r = ratio * h
            wider = r + h / (1 - h / r)
            for place, start in itertools.product((0.1, 0.3, 0.5, 0.8), (-4, -1, -0.2, 0, 0.3, 2)):
                m = mpmath.exp(start * mpmath.sqrt(r))
                up = place * mpmath.mpf(span)
                odds = -mpmath.expm1(up - span) / (mpmath.exp(up) - mpmath.exp(up - span))
                found = odds * price(m * mpmath.exp(up), r)
                found += (1 - odds) * price(m * mpmath.exp(up - span), r)
                assert found <= price(m, wider)


def test_the_reserve_pays_for_every_step():
    def reserve(v):
        return v + mpmath.mpf(5) / 2 + mpmath.log1p(v)

    with mpmath.workdps(40):
        for u, w in itertools.product((0, 0.1, 1, 7, 100, 1e4, 1e7), (1e-4, 0.1, 0.5, 0.9, 1)):
            u, w = mpmath.mpf(u), mpmath.mpf(w)
            assert reserve(u + w) >= reserve(u) + w / (1 - w / reserve(u))


def test_the_theorem_as_stated():
    rho, largest = 0.2, 0.003
    s, h = 2 * rho, 2 * largest
    mu = math.sqrt(s + h * (2.5 + math.log1p(s / h)))
    assert adaptive_epsilon(rho, largest, DELTA) == pytest.approx(gdp_to_dp(mu, DELTA), rel=1e-12)
    assert adaptive_epsilon(rho, largest, DELTA) >= gdp_to_dp(mu, DELTA)


def test_bounds_never_exceed_what_was_known():
    for span, queries in itertools.product((1e-6, 0.02, 1.0, 50.0, 200.0), (1, 7, 300, 10**6)):
        found = bounded_range_epsilon(span, queries, DELTA)
        rho = queries * (span * span / 8)
        assert found <= zcdp_to_dp(rho * (1 + 1e-12), DELTA)[0] * (1 + 1e-9)
        assert found <= queries * span * (1 + 1e-12)
    assert adaptive_epsilon(math.inf, 1.0, DELTA) == math.inf
    for span in (1e-200, 1e-17, 1e100, 1e308):
        assert 0 <= bounded_range_epsilon(span, FEW, DELTA) <= FEW * span * (1 + 1e-12)
    assert bounded_range_epsilon(0.0, 5, DELTA) == bounded_range_epsilon(1.0, 0, DELTA) == 0.0


def test_it_grows_with_range_and_number():
    spans = [bounded_range_epsilon(0.01 * k, 64, DELTA) for k in range(1, 40)]
    assert all(a < b for a, b in itertools.pairwise(spans))
    counts = [bounded_range_epsilon(0.1, k, DELTA) for k in (*range(1, 40), FEW, FEW + 1, 10**4)]
    assert all(a < b for a, b in itertools.pairwise(counts))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1.0, 3, DELTA), "span must be finite and >= 0"),
        ((math.inf, 3, DELTA), "span must be finite"),
        ((1.0, -3, DELTA), "queries must be an integer >= 0"),
        ((1.0, 3, 1.0), "delta must be in"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        bounded_range_epsilon(*arguments)
