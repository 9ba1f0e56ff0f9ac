"""ClippedLogPool: no pool exceeds its bound, and the rounding of the range is charged."""

import itertools
import math

import mpmath
import numpy as np
import pytest

from adapmixed.privacy.costs import (
    RANGE_ERROR,
    bounded_range_rho,
    individual_rho,
    range_rounding,
)

SETTINGS = list(itertools.product([1e-6, 0.5, 2.0, 300.0], [0.0, 1e-9, 0.25, 40.0], [1e-9, 3.0]))


@pytest.mark.parametrize(("scale", "lower", "upper"), SETTINGS)
def test_the_operators_bound_is_held_twice(scale, lower, upper):
    """The bound is 2^-49 (1 + κ max(-a, b) + L) with L = 750; see csrc/log_pool/formula.h."""
    with mpmath.workdps(40):
        bound = mpmath.mpf(2) ** -49 * (1 + mpmath.mpf(scale) * max(lower, upper) + 750)
        assert 2 * bound * (1 - mpmath.mpf(2) ** -50) <= range_rounding(scale, -lower, upper)
        assert range_rounding(scale, -lower, upper) <= 2 * bound * (1 + mpmath.mpf(2) ** -50)


@pytest.mark.parametrize(("scale", "lower", "upper"), SETTINGS)
@pytest.mark.parametrize("num_models", [1, 10**6])
def test_what_is_charged_holds_the_rounding(scale, lower, upper, num_models):
    with mpmath.workdps(40):
        nominal = mpmath.mpf(scale) * (mpmath.mpf(lower) + mpmath.mpf(upper)) / num_models
        widened = nominal * (1 + mpmath.mpf(RANGE_ERROR))
        added = mpmath.mpf(2) ** -48 * (751 + mpmath.mpf(scale) * max(lower, upper))
        for adjacency, factor in (("zero_out", 1), ("replace_one", 2)):
            found = bounded_range_rho(scale, -lower, upper, num_models, adjacency)
            least = (factor * (widened + added)) ** 2 / 8
            assert least * (1 - mpmath.mpf(2) ** -50) <= found <= least * (1 + 2.0**-40)
        spans = np.array([0.0, 1e-12, lower + upper])
        charged = individual_rho(spans, scale, -lower, upper, num_models)
        for span, rho in zip(spans.tolist(), charged.tolist(), strict=True):
            eta = mpmath.mpf(scale) * mpmath.mpf(span) / num_models
            least = (eta * (1 + mpmath.mpf(RANGE_ERROR)) + added) ** 2 / 8
            assert least * (1 - mpmath.mpf(2) ** -50) <= rho <= least * (1 + 2.0**-40)


def test_a_range_of_nothing_costs_nothing():
    assert bounded_range_rho(0.0, -1.0, 1.0, 5, "zero_out") == 0.0
    assert bounded_range_rho(3.0, 0.0, 0.0, 5, "replace_one") == 0.0
    assert bounded_range_rho(1e-200, -1.0, 1.0, 5, "zero_out") > 0.0


def pool(q, clipped_ratios, scale):
    logits = np.log(q) + scale * clipped_ratios.mean(axis=0)
    p = np.exp(logits - logits.max())
    return p / p.sum()


@pytest.mark.slow
def test_no_log_pool_beats_its_bound():
    """Random pools, half of them extremal, keep the bound at six orders, both ways."""
    generator, worst = np.random.default_rng(11), 0.0
    for _ in range(4000):
        models, vocabulary = int(generator.choice([1, 2, 3, 10])), int(generator.integers(2, 7))
        lower, upper = -generator.exponential(1), generator.exponential(1)
        scale = generator.uniform(0.2, 3)
        q = generator.dirichlet(np.full(vocabulary, generator.choice([0.3, 1.0, 5.0]))) + 1e-9
        shape = (models + 1, vocabulary)
        ratios = np.clip(generator.normal(0, 3, shape), lower, upper)
        if generator.random() < 0.5:
            ratios = np.where(generator.random(shape) < 0.5, lower, upper)
        p = pool(q / q.sum(), ratios[:-1], scale)
        emptied, replaced = ratios[:-1].copy(), ratios[:-1].copy()
        emptied[0], replaced[0] = 0.0, ratios[-1]
        for way, other in (("zero_out", emptied), ("replace_one", replaced)):
            distribution = pool(q / q.sum(), other, scale)
            rho = bounded_range_rho(scale, lower, upper, models, way)
            for order in (1.01, 1.5, 2.0, 4.0, 18.0, 100.0):
                for a, b in ((p, distribution), (distribution, p)):
                    # A distribution of bounded range: no overflow at these orders.
                    log = order * np.log(a) + (1 - order) * np.log(b)
                    top = log.max()
                    loss = (top + math.log(np.exp(log - top).sum())) / (order - 1)
                    assert loss <= order * rho + 1e-11
                    worst = max(worst, loss / (order * rho) if rho > 1e-6 else 0.0)
    assert worst > 0.95


def test_the_bounded_range_bound_is_tight():
    """Two tokens of near-equal mass at the ends of the range attain the bound as η → 0."""
    eta, order = 1e-2, 2.0
    p = np.array([0.5, 0.5])
    other = p * np.exp([-eta / 2, eta / 2])
    other /= other.sum()
    loss = math.log(float(np.sum(p**order * other ** (1 - order)))) / (order - 1)
    rho = bounded_range_rho(1.0, -eta / 2, eta / 2, 1, "zero_out")
    assert 0.999 * order * rho < loss <= order * rho
