"""Closed forms against 60-digit arithmetic and against dp-accounting; each on its safe side."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp

from adapmixed.privacy import (
    amplification_rate,
    c_alpha,
    gaussian_rdp,
    radius_for_epsilon,
    rdp_to_dp,
    screening_rdp,
    screening_rho,
    sound_bound,
    subsampled_rdp,
    zcdp_to_dp,
)

ORDERS = [1 + 1e-9, 1.01, 1.5, 2.0, 3.0, 18.0, 123.4, 1e6]
TIGHT = 1e-11  # relative room above the exact value: rounding, not slack


def exactly(function):
    """Evaluates `function` of mpmath numbers with 60 digits."""
    with mpmath.workdps(60):
        return mpmath.mpf(function())


def assert_just_above(value, exact, tolerance=TIGHT):
    with mpmath.workdps(60):
        assert value >= exact
        assert value - exact <= tolerance * abs(exact) + mpmath.mpf(10) ** -300


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("delta", [0.9, 0.1, 1e-5, 1e-12, 1e-300])
def test_c_alpha_is_just_above_the_exact_value(order, delta):
    def formula():
        a, d = mpmath.mpf(order), mpmath.mpf(delta)
        return mpmath.log((a - 1) / a) - (mpmath.log(d) + mpmath.log(a)) / (a - 1)

    exact = exactly(formula)
    assert c_alpha(order, delta) >= exact
    scale = 1 + (abs(math.log(delta)) + math.log(order)) / (order - 1)
    assert c_alpha(order, delta) - float(exact) <= 1e-13 * scale + 1e-12 * abs(float(exact))


def test_c_alpha_of_the_paper():
    assert c_alpha(18, 1e-5) == pytest.approx(0.45005, abs=5e-6)
    assert 0.0 < c_alpha(18, 1e-5) < 0.4501
    assert c_alpha(2, 0.9) < 0  # the cost of a large delta may be negative ...
    assert rdp_to_dp(2, 0.01, 0.9) == 0.0  # ... the statement is not


@pytest.mark.parametrize("order", [1.5, 2, 6, 18, 100])
@pytest.mark.parametrize("epsilon", [0.05, 0.474, 3.0, 50.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_conversion_agrees_with_dp_accounting(order, epsilon, delta):
    theirs, _ = rdp.compute_epsilon([order], [epsilon], delta)
    assert rdp_to_dp(order, epsilon, delta) == pytest.approx(theirs, rel=1e-12)


def test_infinite_cost_stays_infinite():
    assert rdp_to_dp(18, math.inf, 1e-5) == math.inf
    assert sound_bound(3, math.inf, 80) == math.inf
    assert subsampled_rdp(3, 0.5, lambda k: math.inf) == math.inf
    assert zcdp_to_dp(math.inf, 1e-5)[0] == math.inf


def test_screening_cost_of_the_wikitext_preset():
    assert screening_rdp(18, 1e-4, 1e-2, 100) == pytest.approx(1.8e-7, rel=1e-12)
    total = 9728 * screening_rdp(18, 1e-4, 1e-2, 100)
    assert total == pytest.approx(0.00175104, rel=1e-12)
    # 0.2 % of the total of Table 2b, not the 0.002 % of the text.
    assert 100 * total / 0.924 == pytest.approx(0.19, abs=0.005)
    assert screening_rdp(18, 0.0, 1e-2, 100) == 0.0


@pytest.mark.parametrize("order", [1.5, 18.0, 400.0])
@pytest.mark.parametrize("sigma", [1e-2, 1.0, 7.0])
def test_gaussian_cost_agrees_with_dp_accounting(order, sigma):
    weight, num_models, delta = 0.7, 10, 1e-30  # a delta so small that nothing is cut at 0
    sensitivity = math.sqrt(2) * weight / num_models
    accountant = rdp.RdpAccountant([order])
    accountant.compose(dp_accounting.GaussianDpEvent(sigma / sensitivity))
    expected = accountant.get_epsilon(delta)
    ours = gaussian_rdp(order, sensitivity, sigma)
    assert rdp_to_dp(order, ours, delta) == pytest.approx(expected, rel=1e-12)
    assert screening_rdp(order, weight, sigma, num_models) == pytest.approx(ours, rel=1e-12)
    ratio = exactly(lambda: mpmath.mpf(weight) / (num_models * mpmath.mpf(sigma)))
    assert_just_above(screening_rho(weight, sigma, num_models), exactly(lambda: ratio**2))


def test_rescaling_before_the_noise_breaks_the_sensitivity():
    vocabulary, top_k, weight, num_models = 50_257, 60, 1e-4, 100
    public = np.full(vocabulary, 1 / vocabulary)
    private = np.zeros(vocabulary)
    private[0] = 1.0
    emptied = public  # every member, hence the whole average, at the public distribution
    average = emptied + weight / num_models * (private - public)
    claimed = math.sqrt(2) * weight / num_models

    def head(values):
        return values[:top_k]

    before = np.linalg.norm(head(average) - head(emptied))
    after = np.linalg.norm(
        head(average) / head(average).sum() - head(emptied) / head(emptied).sum()
    )
    assert before <= claimed
    assert after > 500 * claimed


def test_zcdp_conversion_finds_the_best_order():
    for rho, delta in itertools.product([1e-8, 9.7e-5, 0.1, 30.0], [1e-5, 1e-9]):
        epsilon, order = zcdp_to_dp(rho, delta)
        grid = 1 + np.exp(np.linspace(-6, 25, 4000))
        best = min(rdp_to_dp(a, a * rho, delta) for a in grid)
        assert epsilon <= best * (1 + 1e-6)
        assert (
            epsilon
            >= exactly(lambda a=order, r=rho: mpmath.mpf(a) * mpmath.mpf(r))
            + c_alpha(order, delta)
            - 1e-13
        )
    assert zcdp_to_dp(0.0, 1e-5) == (0.0, math.inf)


@pytest.mark.parametrize("order", [2, 3, 18, 64])
@pytest.mark.parametrize("rate", [1e-4, 0.02, 0.5, 0.97])
@pytest.mark.parametrize("sigma", [0.5, 2.0, 20.0])
def test_subsampled_gaussian_agrees_with_dp_accounting(order, rate, sigma):
    delta = 1e-30
    accountant = rdp.RdpAccountant([order])
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
    accountant.compose(event)
    expected = accountant.get_epsilon(delta)
    ours = subsampled_rdp(order, rate, lambda k: k / (2 * sigma**2))
    assert rdp_to_dp(order, ours, delta) == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("order", [2, 5, 18, 200])
@pytest.mark.parametrize("rate", [1e-9, 0.03, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 0.7, 40.0, 1e5])
def test_subsampled_cost_is_just_above_the_exact_value(order, rate, scale):
    def formula():
        s, a = mpmath.mpf(rate), order
        total = (1 - s) ** (a - 1) * (1 + (a - 1) * s)
        for k in range(2, a + 1):
            growth = mpmath.exp((k - 1) * mpmath.mpf(scale * k))
            total += mpmath.binomial(a, k) * (1 - s) ** (a - k) * s**k * growth
        return mpmath.log(total) / (a - 1)

    assert_just_above(subsampled_rdp(order, rate, lambda k: scale * k), exactly(formula))


def test_subsampling_at_the_ends_of_the_rate():
    assert subsampled_rdp(18, 0.0, lambda k: 1.0) == 0.0
    assert subsampled_rdp(18, 1.0, lambda k: float(k)) == 18.0
    assert subsampled_rdp(18, 0.5, lambda k: 0.0) == 0.0


def exact_sound_bound(order, radius, num_models, rate):
    def formula():
        a, r = mpmath.mpf(order), mpmath.mpf(radius)
        share = mpmath.mpf(rate) / num_models
        return mpmath.log1p(share * mpmath.expm1((a - 1) * r)) / (a - 1)

    return exactly(formula)


GRID = list(
    itertools.product(
        [1 + 1e-6, 1.5, 3.0, 18.0, 1000.0],
        [1e-12, 1e-3, 0.03, 3.6, 50.0, 1e4],
        [1, 2, 80],
        [1, 0.1],
    )
)


@pytest.mark.parametrize(("order", "radius", "num_models", "rate"), GRID)
def test_sound_bound_is_just_above_the_exact_value(order, radius, num_models, rate):
    bound = sound_bound(order, radius, num_models, rate)
    assert bound <= radius
    assert_just_above(bound, exact_sound_bound(order, radius, num_models, rate))


@pytest.mark.parametrize(("order", "epsilon", "num_models", "rate"), GRID)
def test_radius_is_admissible_and_largest(order, epsilon, num_models, rate):
    radius = radius_for_epsilon(order, epsilon, num_models, rate)
    assert sound_bound(order, radius, num_models, rate) <= epsilon
    assert exact_sound_bound(order, radius, num_models, rate) <= epsilon
    assert exact_sound_bound(order, radius * (1 + 1e-10), num_models, rate) > epsilon
    assert radius >= epsilon


def test_radius_at_the_ends():
    assert radius_for_epsilon(3, 0.0, 80) == 0.0
    assert radius_for_epsilon(3, math.inf, 80) == math.inf
    assert radius_for_epsilon(3, 0.1, 80, rate=0.0) == math.inf
    assert sound_bound(3, 0.0, 80) == sound_bound(3, 5.0, 80, rate=0.0) == 0.0
    assert sound_bound(18, 0.3, 1) == 0.3
    assert radius_for_epsilon(18, 1e-320, 80) >= 0.0
    assert math.isfinite(radius_for_epsilon(18, 1e307, 80))


def test_amplification_rate():
    assert amplification_rate(0.03, 100, "slots") == 0.03
    exact = exactly(lambda: 1 - (1 - mpmath.mpf(0.03)) ** 100)
    assert_just_above(amplification_rate(0.03, 100, "subset"), exact)
    assert amplification_rate(0.03, 1, "subset") == pytest.approx(0.03, rel=1e-14)
    assert amplification_rate(0.0, 9, "subset") == 0.0
    assert amplification_rate(1.0, 9, "subset") == 1.0
    assert amplification_rate(1 - 1e-12, 9, "subset") <= 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: c_alpha(0.5, 1e-5), "order must be > 1, got 0.5"),
        (lambda: c_alpha(1, 1e-5), "order must be > 1, got 1"),
        (lambda: c_alpha(math.inf, 1e-5), "order must be finite"),
        (lambda: c_alpha(18, 0.0), r"delta must be in \(0, 1\), got 0.0"),
        (lambda: c_alpha(18, 1), r"delta must be in \(0, 1\), got 1"),
        (lambda: rdp_to_dp(18, math.nan, 1e-5), "epsilon must be >= 0, got nan"),
        (lambda: gaussian_rdp(2, 1.0, 0.0), "sigma must be > 0"),
        (lambda: subsampled_rdp(2.5, 0.1, lambda k: 0.1), "order must be an integer, got 2.5"),
        (lambda: subsampled_rdp(1, 0.1, lambda k: 0.1), "order must be an integer >= 2"),
        (lambda: subsampled_rdp(3, 0.1, lambda k: -0.1), r"epsilon\(2\) must be >= 0"),
        (lambda: subsampled_rdp(3, 1.1, lambda k: 0.1), r"rate must be in \[0, 1\], got 1.1"),
        (lambda: sound_bound(3, -1.0, 80), "radius must be >= 0"),
        (lambda: sound_bound(3, math.nan, 80), "radius must be >= 0, got nan"),
        (lambda: sound_bound(3, 1.0, 0), "num_models must be an integer >= 1"),
        (lambda: radius_for_epsilon(3, math.nan, 80), "epsilon must be >= 0"),
        (lambda: amplification_rate(0.1, 8, "both"), "divide_by must be 'slots' or 'subset'"),
        (lambda: zcdp_to_dp(-1.0, 1e-5), "rho must be >= 0"),
    ],
)
def test_errors_in_words(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_screening_bit_hardly_depends_on_private_data_at_the_published_settings():
    """Replacing the whole ensemble by q moves the bit by less than 0.00565 in total variation."""
    weight, sigma = 1e-4, 1e-2
    shift = math.sqrt(2) * weight  # all N members at once: weight ‖mean p_i - q‖
    total_variation = math.erf(shift / (2 * math.sqrt(2) * sigma))
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(sigma / shift))
    assert accountant.get_delta(0.0) == pytest.approx(total_variation, rel=1e-3)
    assert 0.0056 < total_variation < 0.00565
