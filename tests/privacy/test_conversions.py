"""Closed forms against 60-digit arithmetic and dp-accounting; each errs on its safe side."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp
from just_above import assert_just_above, exactly

from adapmixed.privacy.conversions import c_alpha, rdp_to_dp, zcdp_to_dp
from adapmixed.privacy.costs.adapmixed import screening_rho

ORDERS = [1 + 1e-9, 1.01, 1.5, 2.0, 3.0, 18.0, 123.4, 1e6]


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


@pytest.mark.parametrize("order", [1.5, 18, 100])
@pytest.mark.parametrize("epsilon", [0.05, 50.0])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_conversion_agrees_with_dp_accounting(order, epsilon, delta):
    theirs, _ = rdp.compute_epsilon([order], [epsilon], delta)
    assert rdp_to_dp(order, epsilon, delta) == pytest.approx(theirs, rel=1e-12)


def test_infinite_cost_stays_infinite():
    assert rdp_to_dp(18, math.inf, 1e-5) == math.inf
    assert zcdp_to_dp(math.inf, 1e-5)[0] == math.inf


def test_screening_cost_of_the_wikitext_preset():
    assert 18 * screening_rho(1e-4, 1e-2, 100) == pytest.approx(1.8e-7, rel=1e-12)
    total = 9728 * 18 * screening_rho(1e-4, 1e-2, 100)
    assert total == pytest.approx(0.00175104, rel=1e-12)
    # 0.2 % of the total of Table 2b, not the 0.002 % of the text.
    assert 100 * total / 0.924 == pytest.approx(0.19, abs=0.005)
    assert screening_rho(0.0, 1e-2, 100) == 0.0


@pytest.mark.parametrize("order", [1.5, 18.0, 400.0])
@pytest.mark.parametrize("sigma", [1e-2, 1.0, 7.0])
def test_screening_cost_agrees_with_dp_accounting(order, sigma):
    weight, num_models, delta = 0.7, 10, 1e-30  # a delta so small that nothing is cut at 0
    sensitivity = math.sqrt(2) * weight / num_models
    accountant = rdp.RdpAccountant([order])
    accountant.compose(dp_accounting.GaussianDpEvent(sigma / sensitivity))
    expected = accountant.get_epsilon(delta)
    ours = order * screening_rho(weight, sigma, num_models)
    assert rdp_to_dp(order, ours, delta) == pytest.approx(expected, rel=1e-12)
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


def test_screening_bit_hardly_depends_on_private_data_at_the_published_settings():
    """To replace the whole ensemble by q moves the bit by less than 0.00565 in total variation."""
    weight, sigma = 1e-4, 1e-2
    shift = math.sqrt(2) * weight  # all N members at once: weight ‖mean p_i - q‖
    total_variation = math.erf(shift / (2 * math.sqrt(2) * sigma))
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(sigma / shift))
    assert accountant.get_delta(0.0) == pytest.approx(total_variation, rel=1e-3)
    assert 0.0056 < total_variation < 0.00565
