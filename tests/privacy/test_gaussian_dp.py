"""ε of Gaussian DP, against mpmath."""

import math

import pytest
from range_cases import exact_delta

from adapmixed.privacy.gaussian import gdp_to_dp


@pytest.mark.parametrize("delta", [0.3, 1e-2, 1e-5, 1e-9, 1e-15])
@pytest.mark.parametrize("mu", [1e-3, 0.03, 0.3, 1.0, 4.0, 12.0, 25.0])
def test_epsilon_keeps_delta_and_little_less_does_not(mu, delta):
    found = gdp_to_dp(mu, delta)
    assert exact_delta(mu, found) <= delta
    if found > 0 and not math.isinf(found):
        assert exact_delta(mu, found * (1 - 1e-6)) > delta
    assert found < math.inf or mu > 20


@pytest.mark.parametrize(
    ("mu", "delta"), [(31.88, 9.8e-10), (29.04, 2.7e-21), (23.67, 4.9e-50), (3.893, 8e-295)]
)
def test_it_rounds_up_where_doubles_end(mu, delta):
    found = gdp_to_dp(mu, delta)
    assert found == math.inf or exact_delta(mu, found) <= delta


def test_small_and_infinite_distances():
    assert gdp_to_dp(0.0, 1e-5) == 0.0
    assert gdp_to_dp(math.inf, 1e-5) == math.inf
    # δ(0) = 2 Φ(μ/2) - 1 is about 0.4 μ.
    assert gdp_to_dp(1e-6, 1e-5) == 0.0 < gdp_to_dp(1e-4, 1e-5)
    # δ is lost in the rounding of two nearly equal terms: a larger ε is stated.
    assert exact_delta(1e-15, gdp_to_dp(1e-15, 1e-17)) <= 1e-17


def test_it_grows_with_mu_and_falls_with_delta():
    grid = [gdp_to_dp(0.1 * k, 1e-6) for k in range(1, 60)]
    assert all(a < b for a, b in zip(grid, grid[1:], strict=False))
    assert gdp_to_dp(1.0, 1e-6) > gdp_to_dp(1.0, 1e-5)
