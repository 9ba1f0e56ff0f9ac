"""Conversions and compositions over a grid are never below dp-accounting's, and hardly above."""

import math

import dp_accounting
import pytest
from dp_accounting import rdp

from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    GaussianScreening,
    RenyiBound,
)
from adapmixed.privacy.account import ShardBudget
from adapmixed.privacy.composition import FEW
from adapmixed.privacy.conversions import gdp_to_dp, zcdp_to_dp
from adapmixed.privacy.costs import bounded_range_rho

DELTAS = (1e-3, 1e-5, 1e-9)
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(11, 64)) + [128, 256, 512, 1024]
ULPS = 1e-13  # relative: theirs is rounded to nearest, ours up


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("rho", [1e-6, 1e-4, 1e-2, 0.3, 5.0, 80.0])
def test_zcdp(rho, delta):
    theirs, _ = rdp.compute_epsilon(ORDERS, [order * rho for order in ORDERS], delta)
    ours = zcdp_to_dp(rho, delta)
    assert ours <= theirs * (1 + 1e-9)  # every order, not those of a grid
    # A Gaussian has exactly ρ-zCDP, so its tight ε can only be smaller.
    assert ours >= gdp_to_dp(math.sqrt(2 * rho), delta) * (1 - 1e-9)
    assert ShardBudget("zcdp", rho).epsilon(delta) == ours


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("queries", [1, 100, 9728])
def test_log_pools(queries, delta):
    for scale in (0.5, 2.0):
        accountant = rdp.RdpAccountant(ORDERS)
        rho = (scale * 0.75 / 20) ** 2 / 8
        # ρ-zCDP costs as much as a Gaussian of sensitivity 1 and σ = 1/√(2ρ).
        accountant.compose(dp_accounting.GaussianDpEvent(1 / math.sqrt(2 * rho)), queries)
        event = BoundedRangeAnswer(scale, -0.25, 0.5, 20, queries)
        found = Accountant(delta).add(event).guarantee()
        assert found.epsilon <= accountant.get_epsilon(delta) * (1 + 1e-7) + 1e-12
        if queries > FEW:  # between the Gaussians without and with the theorem's reserve
            reserve = 2 * rho * (2.5 + math.log1p(queries))
            distances = (math.sqrt(2 * queries * rho + more) for more in (0.0, reserve))
            least, most = (gdp_to_dp(mu, delta) for mu in distances)
            assert least * (1 - 1e-9) <= found.epsilon <= most * (1 + 1e-7)
        assert bounded_range_rho(scale, -0.25, 0.5, 20, "zero_out") >= rho


@pytest.mark.parametrize("delta", DELTAS)
@pytest.mark.parametrize("queries", [1, 100, 9728])
def test_bounds_with_screening(queries, delta):
    for sigma in (0.1, 1.0):
        for order, cost in ((1.25, 0.1), (3.0, 1e-4), (18.0, 0.01), (64.0, 2.0)):
            accountant = rdp.RdpAccountant([order])
            sensitivity = math.sqrt(2) * 0.1 / 20
            accountant.compose(dp_accounting.GaussianDpEvent(sigma / sensitivity), queries)
            screened = queries * order * (0.1 / 20 / sigma) ** 2
            theirs = rdp.compute_epsilon([order], [screened + queries * cost], delta)[0]
            events = [
                GaussianScreening(20, queries, 0.1, sigma),
                RenyiBound(order, cost, 20, queries),
            ]
            found = Accountant(delta).add(events).guarantee().epsilon
            assert theirs * (1 - ULPS) <= found <= theirs * (1 + 1e-9) + 1e-12
            alone = Accountant(delta).add(events[0]).guarantee()
            assert alone.epsilon <= max(0.0, accountant.get_epsilon(delta)) * (1 + 1e-7) + 1e-9
