"""Costs of one answer: no mechanism beats its bound, and every rounding is charged.

Closed forms are compared with exact rationals and 60 digits; each errs on its safe side.
"""

import itertools
import math
from fractions import Fraction

import dp_accounting
import mpmath
import numpy as np
import pytest
from exact import assert_just_above, exactly
from privacy_cases import hockey_stick, neighbours, random_distributions

from adapmixed.limits import QUESTIONS
from adapmixed.privacy.composition import clipped_mixing_epsilon, composed_epsilon
from adapmixed.privacy.conversions import rdp_to_dp
from adapmixed.privacy.costs import (
    BOX_ERROR,
    RANGE_ERROR,
    DominatingPair,
    accounted_box,
    answer_error,
    bounded_range_rho,
    charge_rounding,
    clipped_mixing_pair,
    individual_rho,
    radius_for_epsilon,
    screening_rho,
    sound_bound,
)

# PMixED's bound and radius


def exact_sound_bound(order, radius, models, rate):
    def formula():
        a, r, share = mpmath.mpf(order), mpmath.mpf(radius), mpmath.mpf(rate) / models
        return mpmath.log1p(share * mpmath.expm1((a - 1) * r)) / (a - 1)

    return exactly(formula)


@pytest.mark.parametrize("order", [1 + 1e-6, 1.5, 3.0, 18.0, 1000.0])
@pytest.mark.parametrize("radius", [1e-12, 1e-3, 0.03, 3.6, 50.0, 1e4])
@pytest.mark.parametrize("models", [1, 2, 80])
def test_the_sound_bound_and_the_radius_that_it_admits(order, radius, models):
    for rate in (1, 0.1):
        stated = sound_bound(order, radius, models / rate)
        assert stated <= radius
        assert_just_above(stated, exact_sound_bound(order, radius, models, rate))
    epsilon, widest = radius, radius_for_epsilon(order, radius, models)
    assert widest >= epsilon >= sound_bound(order, widest, models)
    assert exact_sound_bound(order, widest, models, 1) <= epsilon
    assert exact_sound_bound(order, widest * (1 + 1e-10), models, 1) > epsilon


def test_radius_at_the_ends():
    assert sound_bound(3, math.inf, 80) == radius_for_epsilon(3, math.inf, 80) == math.inf
    assert sound_bound(3, 0.0, 80) == radius_for_epsilon(3, 0.0, 80) == 0.0
    assert sound_bound(18, 0.3, 1) == 0.3
    assert radius_for_epsilon(18, 1e-320, 80) >= 0.0
    assert math.isfinite(radius_for_epsilon(18, 1e307, 80))


# AdaPMixED's screening


@pytest.mark.parametrize("order", [1.5, 18.0, 400.0])
@pytest.mark.parametrize("sigma", [1e-2, 1.0, 7.0])
def test_the_screening_costs_alpha_rho(order, sigma):
    """As a Gaussian of the L2 sensitivity √2 λ_s/N does, by dp-accounting's own formula."""
    weight, models = 0.7, 10
    ratio = exactly(lambda: mpmath.mpf(weight) / (models * mpmath.mpf(sigma)))
    assert_just_above(screening_rho(weight, sigma, models), exactly(lambda: ratio**2))
    accountant = dp_accounting.rdp.RdpAccountant([order])
    accountant.compose(dp_accounting.GaussianDpEvent(sigma * models / (math.sqrt(2) * weight)))
    for delta in (1e-30, 1e-9, 1e-5, 1e-3):
        ours = rdp_to_dp(order, order * screening_rho(weight, sigma, models), delta)
        assert ours == pytest.approx(accountant.get_epsilon(delta), rel=1e-12)


# ClippedLogPool

SETTINGS = list(itertools.product([1e-6, 0.5, 2.0, 300.0], [0.0, 1e-9, 0.25, 40.0], [1e-9, 3.0]))


@pytest.mark.parametrize(("scale", "lower", "upper"), SETTINGS)
@pytest.mark.parametrize("num_models", [1, 10**6])
def test_what_is_charged_holds_the_rounding(scale, lower, upper, num_models):
    with mpmath.workdps(40):
        nominal = mpmath.mpf(scale) * (mpmath.mpf(lower) + mpmath.mpf(upper)) / num_models
        widened = nominal * (1 + mpmath.mpf(RANGE_ERROR))
        # Twice 2^-49 (1 + κ max(-a, b) + L) with L = 750; see csrc/log_pool/formula.h.
        added = mpmath.mpf(2) ** -48 * (751 + mpmath.mpf(scale) * max(lower, upper))
        for adjacency, factor in (("zero_out", 1), ("replace_one", 2)):
            rho = bounded_range_rho(scale, -lower, upper, num_models, adjacency)
            least = (factor * (widened + added)) ** 2 / 8
            assert least * (1 - mpmath.mpf(2) ** -50) <= rho <= least * (1 + 2.0**-40)
        spans = np.array([0.0, 1e-12, lower + upper])
        charged = individual_rho(spans, scale, -lower, upper, num_models)
        for span, rho in zip(spans.tolist(), charged.tolist(), strict=True):
            eta = mpmath.mpf(scale) * mpmath.mpf(span) / num_models
            least = (eta * (1 + mpmath.mpf(RANGE_ERROR)) + added) ** 2 / 8
            assert least * (1 - mpmath.mpf(2) ** -50) <= rho <= least * (1 + 2.0**-40)


def test_the_bounded_range_bound_is_tight():
    """Two tokens of near-equal mass at the ends of the range attain the bound as η → 0."""
    assert bounded_range_rho(0.0, -1.0, 1.0, 5, "zero_out") == 0.0
    assert bounded_range_rho(3.0, 0.0, 0.0, 5, "replace_one") == 0.0
    assert bounded_range_rho(1e-200, -1.0, 1.0, 5, "zero_out") > 0.0
    eta, order = 1e-2, 2.0
    p = np.array([0.5, 0.5])
    other = p * np.exp([-eta / 2, eta / 2])
    other /= other.sum()
    loss = math.log(float(np.sum(p**order * other ** (1 - order)))) / (order - 1)
    rho = bounded_range_rho(1.0, -eta / 2, eta / 2, 1, "zero_out")
    assert 0.999 * order * rho < loss <= order * rho


# ClippedMixing

RATIOS = np.concatenate([[0.0], np.exp(np.linspace(-4, 4, 161)), 1 + np.linspace(-0.05, 0.05, 41)])


def of_pair(pair, ratios=RATIOS):
    return hockey_stick(*np.array(pair.atoms).T, ratios)


@pytest.mark.parametrize("adjacency", QUESTIONS)
def test_pairs_grow_with_the_box_and_shrink_with_the_ensemble(adjacency):
    generator = np.random.default_rng(3)
    for _ in range(300):
        lower, upper = generator.uniform(0, 1), 1 + generator.exponential(2)
        num_models = int(generator.integers(1, 30))
        here = of_pair(clipped_mixing_pair(lower, upper, num_models, adjacency))
        wider = (lower * generator.uniform(0, 1), upper * (1 + generator.exponential(0.5)))
        for box in (wider, accounted_box(lower, upper)):
            assert (here <= of_pair(clipped_mixing_pair(*box, num_models, adjacency)) + 1e-13).all()
        more = of_pair(clipped_mixing_pair(lower, upper, num_models + 1, adjacency))
        assert (more <= here + 1e-13).all()


@pytest.mark.parametrize("adjacency", QUESTIONS)
def test_answers_computed_with_an_error_stay_below_the_accounted_pair(adjacency):
    """The error of the mixture is at its stated limit, always to the attacker's advantage."""
    generator, num_models, lower, upper = np.random.default_rng(8), 4, 0.7, 1.6
    error = BOX_ERROR * lower / (2 * num_models * upper)
    exact = clipped_mixing_pair(lower, upper, num_models, adjacency)
    accounted = clipped_mixing_pair(*accounted_box(lower, upper), num_models, adjacency)
    room = of_pair(accounted) - of_pair(exact)
    assert room.max() > 10 * error * lower / num_models  # the widening is visible at this error
    for _ in range(200):
        p, q = neighbours(*random_distributions(generator, 4, num_models, lower, upper), adjacency)
        sign = np.where(p > q, 1, -1)
        p, q = p * (1 + sign * error), q * (1 - sign * error)
        p, q = p / p.sum(), q / q.sum()
        assert (hockey_stick(p, q, RATIOS) <= of_pair(accounted) + 1e-15).all()


def test_where_the_widened_box_does_not_hold_the_rounding():
    """Beyond the range in docs/theory/clipped-mixing.md, the error is accounted separately."""
    covered = [(0.1, 250.0, 100), (0.6, 90.0, 1000), (0.5, 2.0, 2), (0.9, 1.3, 10_000)]
    beyond = [(0.1, 250.1, 100), (0.5651, 96.27, 1000), (0.5, 2.0, 1), (0.0, 2.0, 50)]
    assert all(answer_error(*box) == 0.0 for box in covered)
    for lower, upper, models in [*beyond, (0.9, 1.1, 20_000)]:
        error = answer_error(lower, upper, models)
        assert 1.6e-11 < error <= 1.6e-11 + 2 * models * 2.0**-52
        for adjacency in QUESTIONS:
            pair = clipped_mixing_pair(*accounted_box(lower, upper), models, adjacency)
            within = {"queries": 508, "delta": 0.3, "points": 2**12}
            bare = composed_epsilon(pair, **within)
            epsilon = clipped_mixing_epsilon(lower, upper, models, adjacency=adjacency, **within)
            assert epsilon >= bare + 2 * 508 * error or bare == math.inf == epsilon
            assert epsilon == pytest.approx(bare, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("order", [1.001, 2.0, 8.0, 1000.0])
def test_what_rounding_adds_to_a_charge(order):
    """It is (2α-1)/(α-1) (4 e₀ + N 2^-52) and 2 (α+1) e₀ with e₀ = 4e-12, slightly rounded up."""
    for models in (1, 64, 10**6):
        relative, absolute = charge_rounding(order, models)
        growth, distribution = (2 * Fraction(order) - 1) / (Fraction(order) - 1), Fraction(2.0**-52)
        exact = growth * (Fraction(4, 10**12) * 4 + models * distribution)
        assert exact <= Fraction(absolute) <= exact * (1 + Fraction(1e-12))
        assert relative == pytest.approx(2 * (order + 1) * 4e-12, rel=1e-12)


def test_a_box_from_zero():
    infinite = clipped_mixing_pair(0.0, 3.0, 5, "replace_one")
    assert infinite.largest_loss() == math.inf and infinite.renyi(2.0) == math.inf
    # With lower = 0, member i alone may hold a token, so that emptying it shows with mass 1/N.
    emptied = clipped_mixing_pair(0.0, 3.0, 5, "zero_out").exchanged()
    assert of_pair(emptied, [math.exp(50.0)]) == pytest.approx(2 / 3 / 5)


def test_a_box_without_room_answers_the_public_distribution():
    for box in ((1.0, 1.0), (1.0, 3.0), (0.2, 1.0)):
        for adjacency in QUESTIONS:
            assert clipped_mixing_pair(*box, 7, adjacency) == DominatingPair(((1.0, 1.0),))
        assert clipped_mixing_epsilon(*box, 1, 2**40, 1e-15, "replace_one") == 0.0
    assert accounted_box(0.5, 2.0) == (0.5 * (1 - BOX_ERROR), 2 * (1 + BOX_ERROR))
    assert accounted_box(0.0, 2.0)[0] == 0.0


def test_divergences_of_a_pair():
    pair = DominatingPair(((0.6, 0.5), (0.4, 0.5)))
    assert of_pair(pair, [1.0]) == pytest.approx(0.1)
    assert pair.renyi(2.0) == pytest.approx(math.log(0.72 + 0.32), rel=1e-14)
    assert pair.exchanged().atoms == ((0.5, 0.6), (0.5, 0.4))
    assert pair.largest_loss() == pytest.approx(math.log(1.25))
    near = clipped_mixing_pair(1 - 1e-7, 1 + 1e-7, 100, "zero_out")
    chi = math.fsum((a - b) ** 2 / b for a, b in near.atoms)
    assert near.renyi(2.0) == pytest.approx(chi, rel=1e-5)
    assert DominatingPair(((1.0, 0.5), (0.0, 0.5))).renyi(3.0) == pytest.approx(math.log(2))


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
        for atom, stated in zip(exact, pair.atoms, strict=True):
            for mass, approximate in zip(atom, stated, strict=True):
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
        epsilon = composed_epsilon(pair, queries, 1e-300, points=64)
        assert epsilon >= exact * (1 - mpmath.mpf(10) ** -200)
        assert epsilon <= exact * (1 + 2.0**-39) + queries * 2.0**-46
        short += queries * pair.largest_loss() < exact
    assert short > 3  # pairs whose floats alone would state too little
