"""Composed ε against the documented table, exact enumeration and dp-accounting's rounding."""

import itertools
import math
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np
import pytest
from box_attack import hockey_stick, neighbours, random_distributions
from dp_accounting.pld import privacy_loss_distribution

from adapmixed.limits import QUESTIONS
from adapmixed.privacy.composition import (
    PLANNED_POINTS,
    _interval,
    _split,
    clipped_mixing_epsilon,
    composed_epsilon,
)
from adapmixed.privacy.conversions import rdp_to_dp
from adapmixed.privacy.costs.clipped_mixing import (
    DominatingPair,
    clipped_mixing_pair,
)

DELTA = 1e-5
QUERIES = (1024, 9728, 99_840)
# ε at N = 100, c = e^-r, C = e^r, δ = 1e-5, rounded up to three digits.
TABLE = {
    (0.10, "zero_out"): (0.104, 0.355, 1.27),
    (0.25, "zero_out"): (0.308, 1.05, 3.86),
    (0.50, "zero_out"): (0.762, 2.63, 10.3),
    (1.00, "zero_out"): (2.27, 8.15, 36.7),
    (0.10, "replace_one"): (0.216, 0.735, 2.67),
    (0.25, "replace_one"): (0.612, 2.12, 8.14),
    (0.50, "replace_one"): (1.43, 5.11, 21.7),
    (1.00, "replace_one"): (3.86, 15.0, 76.0),
}


def rounded_up(value):
    return float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(Decimal(value)))


@pytest.mark.parametrize("r, adjacency", TABLE)
@pytest.mark.slow
def test_the_table(r, adjacency):
    box = (math.exp(-r), math.exp(r))
    found = [
        clipped_mixing_epsilon(*box, 100, queries, DELTA, adjacency, points=2**18)
        for queries in QUERIES
    ]
    assert tuple(map(rounded_up, found)) == TABLE[r, adjacency]


def enumerated(pair, queries):
    """Return (P, Q) of all outcomes of `queries` independent draws of the pair."""
    masses = []
    for distribution in (pair.p, pair.q):
        total = np.array([1.0])
        for _ in range(queries):
            total = np.multiply.outer(total, np.array(distribution)).ravel()
        masses.append(total)
    return masses


def exact_epsilon(pair, queries, delta):
    """Return the smallest ε >= 0 with Σ (P - e^ε Q)_+ <= δ both ways, by bisection."""
    p, q = enumerated(pair, queries)

    def beyond(epsilon):
        ratio = np.array([math.exp(epsilon)])
        return max(hockey_stick(p, q, ratio)[0], hockey_stick(q, p, ratio)[0])

    if beyond(0.0) <= delta:
        return 0.0
    low, high = 0.0, 60.0
    if beyond(high) > delta:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize("adjacency", QUESTIONS)
@pytest.mark.parametrize("queries", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "lower, upper, num_models", [(0.5, 2.0, 2), (0.8, 5.0, 10), (0.1, 1.05, 3), (0.6, 1.5, 1)]
)
def test_against_enumeration(lower, upper, num_models, queries, adjacency):
    pair = clipped_mixing_pair(lower, upper, num_models, adjacency)
    for delta in (1e-2, 1e-5):
        exact = exact_epsilon(pair, queries, delta)
        found = composed_epsilon(pair, queries, delta, points=2**14)
        assert found >= exact * (1 - 1e-12)
        assert found <= exact * (1 + 1e-6) + 1e-9 or found - exact < 0.002 * pair.largest_loss()


def test_infinite_ratios():
    pair = clipped_mixing_pair(0.0, 2.0, 50, "zero_out")
    for queries in (1, 3):
        assert composed_epsilon(pair, queries, DELTA) == math.inf
        exact = exact_epsilon(pair, queries, 0.1)
        found = composed_epsilon(pair, queries, 0.1, points=2**14)
        assert exact * (1 - 1e-12) <= found <= exact * (1 + 1e-3) + 1e-12
    disjoint = DominatingPair((1.0, 0.0), (0.0, 1.0))
    assert composed_epsilon(disjoint, 1, 0.5) == math.inf
    part = DominatingPair((0.9, 0.1), (1.0, 0.0))
    assert composed_epsilon(part, 1, 0.11, points=2**12) == pytest.approx(0.0, abs=0.02)
    assert composed_epsilon(part, 2, 0.11) == math.inf


def test_adaptive_answers_stay_below_the_composed_pair():
    """There are two queries, and the second ensemble depends on the first token."""
    generator = np.random.default_rng(4)
    ratios = np.exp(np.linspace(-3, 3, 61))
    for lower, upper, num_models in ((0.5, 2.0, 2), (0.2, 1.3, 3), (0.8, 4.0, 1)):
        for adjacency in QUESTIONS:
            pair = clipped_mixing_pair(lower, upper, num_models, adjacency)
            p, q = enumerated(pair, 2)
            forward, backward = hockey_stick(p, q, ratios), hockey_stick(q, p, ratios)
            for _ in range(10):
                first = random_distributions(generator, 3, num_models, lower, upper)
                first_p, first_q = neighbours(*first, adjacency)
                parts = [
                    neighbours(
                        *random_distributions(generator, 3, num_models, lower, upper), adjacency
                    )
                    for _ in range(3)
                ]
                p = np.concatenate([a * b[0] for a, b in zip(first_p, parts, strict=True)])
                q = np.concatenate([a * b[1] for a, b in zip(first_q, parts, strict=True)])
                assert (hockey_stick(p, q, ratios) <= forward + 1e-12).all()
                assert (hockey_stick(q, p, ratios) <= backward + 1e-12).all()


def rounded(pair, queries, interval, pessimistic):
    """Return dp-accounting's ε, with every loss rounded up or down to a multiple of interval."""
    logs = [
        {atom: math.log(mass) for atom, mass in enumerate(distribution) if mass > 0}
        for distribution in (pair.p, pair.q)
    ]
    single = privacy_loss_distribution.from_two_probability_mass_functions(
        logs[1],
        logs[0],
        pessimistic_estimate=pessimistic,
        value_discretization_interval=interval,
        symmetric=False,
    )
    return single.self_compose(queries)


@pytest.mark.slow
def test_an_infinite_loss_among_all_answers():
    """With c = 0, ε is +inf exactly if the probability of such a loss is above δ."""
    pair = clipped_mixing_pair(0.0, 1.5, 1000, "zero_out")
    infinite = max(
        math.fsum(a for a, b in zip(one.p, one.q, strict=True) if b == 0)
        for one in (pair, pair.exchanged())
    )
    assert infinite > 0
    for queries in (1, 40, 3000):
        beyond = -math.expm1(queries * math.log1p(-infinite))
        assert composed_epsilon(pair, queries, beyond * (1 - 1e-6)) == math.inf
        assert composed_epsilon(pair, queries, min(0.99, 1.01 * beyond)) < math.inf


@pytest.mark.parametrize("adjacency", QUESTIONS)
@pytest.mark.parametrize("lower, upper", [(0.7788, 1.284), (0.6, 7.0), (0.05, 1.1)])
@pytest.mark.parametrize("num_models", [1, 2, 20, 500])
@pytest.mark.parametrize("queries", [1, 7, 100])
@pytest.mark.slow
def test_between_the_two_roundings_of_dp_accounting(queries, num_models, lower, upper, adjacency):
    """Rounding every loss up and down at a fine interval encloses the true value."""
    pair = clipped_mixing_pair(lower, upper, num_models, adjacency)
    # Then one rounding of all losses moves the composed loss by a 25th of its deviation.
    interval = _interval(pair, queries, 500 * queries)
    below, above = (rounded(pair, queries, interval, way) for way in (False, True))
    for delta in (1e-2, 1e-5, 1e-8):
        found = composed_epsilon(pair, queries, delta, points=2**15)
        least, most = (one.get_epsilon_for_delta(delta) for one in (below, above))
        allowed = queries * 2.0**-47 + most * 2.0**-39  # for the rounding of the masses
        assert least <= found * (1 + 1e-12) and found <= most + allowed
        assert most - least <= 3 * queries * interval


def test_splitting_keeps_both_distributions():
    for pair in (clipped_mixing_pair(0.3, 4.0, 5, adjacency) for adjacency in QUESTIONS):
        for interval in (0.3, 1e-3, 1e-6):
            forward, backward = _split(pair, interval)
            assert math.fsum(forward.values()) == pytest.approx(1, abs=1e-14)
            assert math.fsum(backward.values()) == pytest.approx(1, abs=1e-14)
            for index, mass in forward.items():
                assert backward[-index] == pytest.approx(mass * math.exp(-index * interval))


def test_an_accountants_epsilon_is_no_larger_than_a_planned_one():
    """At a tiny δ the noise of the FFT can make the finer grid's ε the larger one."""
    at = (math.exp(-1), math.e, 10, 400, 1e-12, "zero_out")
    assert clipped_mixing_epsilon(*at) <= clipped_mixing_epsilon(*at, points=PLANNED_POINTS)


def test_costs_rise_with_everything_that_costs():
    def cost(r=0.25, queries=1000, delta=DELTA, num_models=100):
        box = (math.exp(-r), math.exp(r))
        return clipped_mixing_epsilon(*box, num_models, queries, delta, "zero_out", points=2**14)

    here = cost()
    assert cost(r=0.3) > here and cost(queries=1100) > here
    assert cost(delta=1e-4) < here and cost(num_models=110) < here
    assert cost(queries=0) == 0.0 and cost(r=0.0) == 0.0
    assert 0.0 < cost(delta=0.5) < 1e-10  # allowed for the rounding of the distributions


def test_any_delta():
    """If FFT noise is not small against δ, the result is the bound in closed form."""
    pair, queries = clipped_mixing_pair(0.7, 1.5, 100, "zero_out"), 10_000
    deltas = [10.0**-k for k in range(2, 16, 3)]
    found = [composed_epsilon(pair, queries, delta, points=2**16) for delta in deltas]
    assert found == sorted(found) and math.isfinite(found[-1])
    for delta, epsilon in zip(deltas, found, strict=True):
        orders = np.geomspace(1.01, 2e3, 400)
        both = [max(pair.renyi(a), pair.exchanged().renyi(a)) for a in orders]
        renyi = min(rdp_to_dp(a, queries * d, delta) for a, d in zip(orders, both, strict=True))
        assert epsilon <= renyi * (1 + 1e-2)
        assert epsilon >= 0.8 * renyi


def test_every_pair_of_orders_is_the_larger_one():
    """The exchanged pair gives the same ε, because both orders are computed."""
    for adjacency, queries in itertools.product(QUESTIONS, (3, 500)):
        pair = clipped_mixing_pair(0.8, 3.0, 20, adjacency)
        ways = [composed_epsilon(x, queries, DELTA, points=2**14) for x in (pair, pair.exchanged())]
        assert ways[0] == pytest.approx(ways[1], rel=1e-9)


@pytest.mark.parametrize("error", [1e-3, 0.02])
def test_an_error_of_the_distributions_costs_epsilon_and_delta(error):
    """It costs 2Tη of ε and the factor e^{-Tη} of δ: docs/theory/numerics.md."""
    pair, queries, delta = clipped_mixing_pair(0.7, 1.6, 3, "zero_out"), 10, 1e-2
    within = {"points": 2**14}
    exact = composed_epsilon(pair, queries, delta * math.exp(-queries * error), **within)
    found = composed_epsilon(pair, queries, delta, error=error, **within)
    assert exact + 2 * queries * error <= found <= exact + 2 * queries * error + 1e-6
    bare = composed_epsilon(pair, queries, delta, **within)
    assert found > bare + 2 * queries * error + 1e-4
