"""Composed ε: enumeration, the FFT's noise and 50 digits; ranges against adversaries."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from privacy_cases import DELTA, grid_delta

from adapmixed.limits import QUESTIONS
from adapmixed.privacy.composition import (
    FEW,
    PLANNED_POINTS,
    _interval,
    _split,
    adaptive_epsilon,
    bounded_range_epsilon,
    clipped_mixing_epsilon,
    composed_epsilon,
    short_interval,
    smallest_epsilon,
)
from adapmixed.privacy.conversions import rdp_to_dp, zcdp_to_dp
from adapmixed.privacy.costs import DominatingPair, clipped_mixing_pair

both_ways = pytest.mark.parametrize("adjacency", QUESTIONS)


@mpmath.workdps(50)
def composed_delta(pair, queries, epsilon):
    """Return δ of `queries` draws of the pair, both orders, over all counts, with 50 digits."""
    atoms = [(mpmath.mpf(a), mpmath.mpf(b)) for a, b in pair.atoms]
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


@both_ways
@pytest.mark.parametrize("queries", [1, 2, 5, 8])
@pytest.mark.parametrize(
    "lower, upper, num_models", [(0.5, 2.0, 2), (0.8, 5.0, 10), (0.1, 1.05, 3), (0.6, 1.5, 1)]
)
def test_against_enumeration(lower, upper, num_models, queries, adjacency):
    pair = clipped_mixing_pair(lower, upper, num_models, adjacency)
    for delta in (1e-2, 1e-5):
        for side in (pair, pair.exchanged()):
            epsilon = composed_epsilon(side, queries, delta, points=2**14)
            assert composed_delta(pair, queries, epsilon) <= delta
            below = epsilon - 0.002 * pair.largest_loss()
            assert below <= 0 or composed_delta(pair, queries, below) > delta


def test_infinite_ratios():
    pair = clipped_mixing_pair(0.0, 2.0, 50, "zero_out")
    for queries in (1, 3):
        assert composed_epsilon(pair, queries, DELTA) == math.inf
        epsilon = composed_epsilon(pair, queries, 0.1, points=2**14)
        assert composed_delta(pair, queries, epsilon) <= 0.1
        assert epsilon < 1e-12 or composed_delta(pair, queries, epsilon * (1 - 1e-3)) > 0.1
    assert composed_epsilon(DominatingPair(((1.0, 0.0), (0.0, 1.0))), 1, 0.5) == math.inf
    # Every finite loss is 0: rounding alone costs.
    assert 0 < clipped_mixing_epsilon(0.0, 1.5, 65_536, 100, 0.1, "replace_one") < 1e-8
    part = DominatingPair(((0.9, 1.0), (0.1, 0.0)))
    assert composed_epsilon(part, 1, 0.11, points=2**12) == pytest.approx(0.0, abs=0.02)
    # ε is +inf exactly if the probability of such a loss among all answers is above δ.
    for queries in (1, 2, 40):
        beyond = -math.expm1(queries * math.log1p(-0.1))
        assert composed_epsilon(part, queries, beyond * (1 - 1e-6)) == math.inf
        assert composed_epsilon(part, queries, min(0.99, 1.01 * beyond), points=2**12) < math.inf


def test_costs_rise_with_everything_that_costs():
    def cost(r=0.25, queries=1000, delta=DELTA, num_models=100):
        box = (math.exp(-r), math.exp(r))
        return clipped_mixing_epsilon(*box, num_models, queries, delta, "zero_out", points=2**14)

    here = cost()
    assert cost(r=0.3) > here and cost(queries=1100) > here
    assert cost(delta=1e-4) < here and cost(num_models=110) < here
    assert cost(queries=0) == 0.0 and cost(r=0.0) == 0.0
    assert 0.0 < cost(delta=0.5) < 1e-10  # allowed for the rounding of the distributions
    # At a tiny δ the noise of the FFT can make the finer grid's ε the larger one.
    at = (math.exp(-1), math.e, 10, 400, 1e-12, "zero_out")
    assert clipped_mixing_epsilon(*at) <= clipped_mixing_epsilon(*at, points=PLANNED_POINTS)


def test_any_delta():
    """If FFT noise is not small against δ, the result is the bound in closed form."""
    pair, queries = clipped_mixing_pair(0.7, 1.5, 100, "zero_out"), 10_000
    deltas = [10.0**-k for k in range(2, 16, 3)]
    epsilons = [composed_epsilon(pair, queries, delta, points=2**16) for delta in deltas]
    assert epsilons == sorted(epsilons) and math.isfinite(epsilons[-1])
    orders = np.geomspace(1.01, 2e3, 400)
    both = [max(pair.renyi(a), pair.exchanged().renyi(a)) for a in orders]
    for delta, epsilon in zip(deltas, epsilons, strict=True):
        renyi = min(rdp_to_dp(a, queries * d, delta) for a, d in zip(orders, both, strict=True))
        assert 0.8 * renyi <= epsilon <= renyi * (1 + 1e-2)


@pytest.mark.parametrize("error", [1e-3, 0.02])
def test_an_error_of_the_distributions_costs_epsilon_and_delta(error):
    """It costs 2Tη of ε and the factor e^{-Tη} of δ: docs/theory/numerics.md."""
    pair, queries, delta = clipped_mixing_pair(0.7, 1.6, 3, "zero_out"), 10, 1e-2
    within = {"points": 2**14}
    exact = composed_epsilon(pair, queries, delta * math.exp(-queries * error), **within)
    epsilon = composed_epsilon(pair, queries, delta, error=error, **within)
    assert exact + 2 * queries * error <= epsilon <= exact + 2 * queries * error + 1e-6
    assert epsilon > composed_epsilon(pair, queries, delta, **within) + 2 * queries * error + 1e-4


# The FFT's noise is far below the amount that δ is lowered by.


def tilted_delta(pair, queries, epsilon, points):
    """Return δ of the composed pair on the same grid, by FFT of tilted distributions.

    The exponential tilt moves the bulk to ε, so rounding is relative to δ, not to 1.
    """
    interval = _interval(pair, queries, points)
    masses = _split(pair, interval)[0]
    index = np.array(sorted(masses))
    mass, loss = np.array([masses[k] for k in index]), index * interval
    low, high = 0.0, 500.0
    for _ in range(200):
        tilt = (low + high) / 2
        distribution = mass * np.exp(tilt * loss)
        below = queries * (distribution @ loss) / distribution.sum() < epsilon
        low, high = (tilt, high) if below else (low, tilt)
    size = 2 * points
    array = np.zeros(size)
    array[index - index[0]] = distribution / distribution.sum()
    composed = np.fft.irfft(np.fft.rfft(array) ** queries, size)
    sums = np.arange(-points, points) + round(epsilon / interval)
    losses = sums * interval
    weight = composed[(sums - queries * int(index[0])) % size]
    weight = weight * np.exp(queries * math.log(distribution.sum()) - tilt * losses)
    return float(np.sum(np.where(losses > epsilon, -np.expm1(epsilon - losses) * weight, 0.0)))


@pytest.mark.parametrize("delta", [1e-5, 1e-9])
@pytest.mark.parametrize("queries", [100, 9728, 99_840])
@both_ways
def test_fft_noise_is_far_below_what_is_allowed_for_it(adjacency, queries, delta):
    pair, points = clipped_mixing_pair(0.8, 1.3, 100, adjacency), 2**16
    epsilon = composed_epsilon(pair, queries, delta, points=points)
    tilted = max(tilted_delta(side, queries, epsilon, points) for side in (pair, pair.exchanged()))
    # T 2^-50, as in docs/theory/clipped-mixing.md; at δ = 1e-9 that is 9 % of it.
    assert delta >= tilted == pytest.approx(delta - queries * 2.0**-50, rel=1e-3)


# ε read off a loss distribution keeps δ at 50 digits, and is hardly above the least.


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
    """Four of these ε would pass δ if the rounding of the sum were left out."""
    interval, generator = short_interval(interval), np.random.default_rng(34)
    for first in (-7, 0, 3, 1_000_003):
        for infinite in (0.0, delta / 3, delta):
            masses = generator.dirichlet(np.full(200, 0.05)) * (1 - infinite)
            epsilon = smallest_epsilon(masses, first, interval, infinite, delta)
            assert exact_delta(masses, first, interval, infinite, epsilon) <= delta
            if epsilon > 0 and infinite < delta:
                least = epsilon * (1 - 1e-9)
                assert exact_delta(masses, first, interval, infinite, least) > delta * (1 - 1e-9)


def test_ends_of_a_loss_distribution():
    half = np.array([0.5, 0.5])
    assert smallest_epsilon(half, -1, 0.5, 0.0, 1e-9) == 0.0
    assert smallest_epsilon(half, 1, 0.5, 1e-3, 1e-4) == math.inf
    # 2^27 steps of an interval of 27 bits would be rounded.
    assert smallest_epsilon(half, 2**27, 0.5, 0.0, 1e-4) == math.inf
    assert smallest_epsilon(np.array([0.5, math.nan]), 1, 0.5, 0.0, 1e-4) == math.inf


@pytest.mark.parametrize("value", [0.1, 1.0, 3e-12, 1e300, 0.0])
def test_intervals_of_few_digits(value):
    interval = short_interval(value)
    assert value <= interval <= value * (1 + 2.0**-25) and short_interval(interval) == interval
    for index in (2**27 - 1, 1_000_003):
        assert value > 1e290 or mpmath.mpf(interval) * index == mpmath.mpf(interval * index)


@pytest.mark.parametrize(
    ("upper", "num_models", "queries", "adjacency"),
    [(8.0, 2, 8, "zero_out"), (8.0, 2, 7, "zero_out"), (6.0, 3, 6, "replace_one")],
)
@pytest.mark.slow
def test_a_wide_box_at_the_default_points(upper, num_models, queries, adjacency):
    """With 2^20 steps, losses from repeated subtraction would exceed δ by up to 1.4e-7."""
    pair = clipped_mixing_pair(math.exp(-0.01), math.exp(upper), num_models, adjacency)
    epsilon = composed_epsilon(pair, queries, DELTA)
    assert DELTA * (1 - 1e-6) < composed_delta(pair, queries, epsilon) <= DELTA


# Answers of a bounded range


@pytest.mark.parametrize("span", [1e-3, 0.05, 0.5, 2.0])
@pytest.mark.parametrize("queries", [1, 2, 3, 5, 16, 40])
def test_no_adversary_of_a_grid_passes_delta(span, queries):
    for delta in (1e-2, 1e-5, 1e-8):
        stated = bounded_range_epsilon(span, queries, delta)
        assert grid_delta(span, queries, stated) <= delta


PRICED = [
    *itertools.product((0.01, 0.1, 0.3), ((2, 256), (8, 16), (16, 16), (64, 16), (256, 16))),
    *((0.01, (FEW + 1, 8)), (0.1, (1024, 6)), (0.01, (4096, 4))),
]


@pytest.mark.parametrize(("span", "grid"), PRICED)
def test_answers_are_priced_within_two_percent_of_the_optimum(span, grid):
    queries, cells = grid
    stated = bounded_range_epsilon(span, queries, DELTA)
    delta = grid_delta(span, queries, stated / 1.02, cells)
    assert delta > DELTA >= grid_delta(span, queries, stated, cells)


@pytest.mark.parametrize("span", [1e-9, 1e-3, 0.02, 0.7, 5.0])
def test_one_answer_against_its_closed_form(span):
    """A step up to (ε + η)/2 is the worst: δ = (1 - e^((ε - η)/2))²/(1 - e^-η)."""
    for share in (0.05, 1e-3, 1e-6):
        delta = share * min(span, 1.0)
        stated = bounded_range_epsilon(span, 1, delta)
        with mpmath.workdps(40):
            exact = span + 2 * mpmath.log1p(-mpmath.sqrt(-delta * mpmath.expm1(-span)))
        assert exact <= stated <= exact * 1.01


@pytest.mark.parametrize("queries", [16, 100, FEW])
def test_the_theorem_covers_the_optimum(queries):
    for span in (0.01, 0.2, 1.0):
        rho = span**2 / 8
        optimum = bounded_range_epsilon(span, queries, DELTA)
        assert optimum <= bounded_range_epsilon(span, queries, DELTA, few=0)
        theorem = min(adaptive_epsilon(queries * rho, rho, DELTA), queries * span)
        epsilon = bounded_range_epsilon(span, queries, DELTA, few=0)
        assert epsilon == pytest.approx(theorem, rel=1e-12)


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
                chord = odds * price(m * mpmath.exp(up), r)
                chord += (1 - odds) * price(m * mpmath.exp(up - span), r)
                assert chord <= price(m, wider)


def test_the_reserve_pays_for_every_step():
    def reserve(v):
        return v + mpmath.mpf(5) / 2 + mpmath.log1p(v)

    with mpmath.workdps(40):
        for u, w in itertools.product((0, 0.1, 1, 7, 100, 1e4, 1e7), (1e-4, 0.1, 0.5, 0.9, 1)):
            u, w = mpmath.mpf(u), mpmath.mpf(w)
            assert reserve(u + w) >= reserve(u) + w / (1 - w / reserve(u))


def test_bounds_never_exceed_what_was_known():
    for span, queries in itertools.product((1e-6, 0.02, 1.0, 50.0, 200.0), (1, 7, 300, 10**6)):
        epsilon = bounded_range_epsilon(span, queries, DELTA)
        rho = queries * (span * span / 8)
        assert epsilon <= zcdp_to_dp(rho * (1 + 1e-12), DELTA) * (1 + 1e-9)
        assert epsilon <= queries * span * (1 + 1e-12)
    assert adaptive_epsilon(math.inf, 1.0, DELTA) == math.inf
    for span in (1e-200, 1e-17, 1e100, 1e308):
        assert 0 <= bounded_range_epsilon(span, FEW, DELTA) <= FEW * span * (1 + 1e-12)
    assert bounded_range_epsilon(0.0, 5, DELTA) == bounded_range_epsilon(1.0, 0, DELTA) == 0.0
