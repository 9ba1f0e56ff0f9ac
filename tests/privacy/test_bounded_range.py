"""Composition of answers of bounded range: exact adversaries, both lemmas, and the optimum."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from privacy_cases import grid_delta, theorem_epsilon

from adapmixed.privacy.composition import FEW, adaptive_epsilon, bounded_range_epsilon
from adapmixed.privacy.conversions import zcdp_to_dp

DELTA = 1e-5


@pytest.mark.parametrize("span", [1e-3, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 16, 40])
def test_no_adversary_of_a_grid_passes_delta(span, queries):
    for delta in (1e-2, 1e-5, 1e-8):
        stated = bounded_range_epsilon(span, queries, delta)
        assert grid_delta(span, queries, stated) <= delta


@pytest.mark.parametrize("span", [0.01, 0.1, 0.3])
@pytest.mark.parametrize(("queries", "cells"), [(2, 256), (8, 16), (16, 16), (64, 16), (256, 16)])
def test_few_answers_are_priced_within_two_percent_of_the_optimum(span, queries, cells):
    stated = bounded_range_epsilon(span, queries, DELTA)
    assert grid_delta(span, queries, stated / 1.02, cells) > DELTA


@pytest.mark.parametrize("span", [1e-9, 1e-3, 0.02, 0.7, 5.0])
def test_one_answer_against_its_closed_form(span):
    """A step up to (ε + η)/2 is the worst: δ = (1 - e^((ε - η)/2))²/(1 - e^-η)."""
    for share in (0.05, 1e-3, 1e-6):
        delta = share * min(span, 1.0)
        stated = bounded_range_epsilon(span, 1, delta)
        with mpmath.workdps(40):
            exact = span + 2 * mpmath.log1p(-mpmath.sqrt(-delta * mpmath.expm1(-span)))
        assert exact <= stated <= exact * 1.01


@pytest.mark.parametrize(
    ("span", "queries", "cells"), [(0.01, FEW + 1, 8), (0.1, 1024, 6), (0.01, 4096, 4)]
)
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


def test_bounds_never_exceed_what_was_known():
    for span, queries in itertools.product((1e-6, 0.02, 1.0, 50.0, 200.0), (1, 7, 300, 10**6)):
        found = bounded_range_epsilon(span, queries, DELTA)
        rho = queries * (span * span / 8)
        assert found <= zcdp_to_dp(rho * (1 + 1e-12), DELTA) * (1 + 1e-9)
        assert found <= queries * span * (1 + 1e-12)
    assert adaptive_epsilon(math.inf, 1.0, DELTA) == math.inf
    for span in (1e-200, 1e-17, 1e100, 1e308):
        assert 0 <= bounded_range_epsilon(span, FEW, DELTA) <= FEW * span * (1 + 1e-12)
    assert bounded_range_epsilon(0.0, 5, DELTA) == bounded_range_epsilon(1.0, 0, DELTA) == 0.0


def test_the_theorem_as_stated():
    for rho, largest in ((0.2, 0.003), (0.05, 1e-4), (2.0, 1e-5)):
        exact = theorem_epsilon(rho, largest, DELTA)
        found = adaptive_epsilon(rho, largest, DELTA)
        assert exact * (1 - 1e-11) <= found <= exact * (1 + 1e-9)
