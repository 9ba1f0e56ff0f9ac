"""The bounds of AdaPMixED in advance are those of its fixed loss."""

import math
from decimal import ROUND_FLOOR

import pytest

from adapmixed.privacy import Accountant, GaussianScreening, RenyiBound
from adapmixed.privacy.conversions import c_alpha
from adapmixed.privacy.costs.pmixed import sound_bound
from adapmixed.privacy.guarantee import format_epsilon
from adapmixed.privacy.planner import adapmixed_beforehand
from adapmixed.privacy.rounding import four_digits

DELTA = 1e-5


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
@pytest.mark.parametrize("beta", [0.0, 1e-3, 0.2])
def test_adapmixed_beforehand_is_its_fixed_loss(adjacency, beta):
    bound = sound_bound(18.0, 18.0 * beta, 100)
    found = adapmixed_beforehand(8.0, DELTA, 100, 1000, adjacency, target_leakage=beta)

    def stated(leakage):
        bound = sound_bound(18.0, 18.0 * leakage, 100)
        total = Accountant(DELTA).add(RenyiBound(18.0, bound, 100, 1000, budget=1000))
        return total.add(GaussianScreening(100, 1000, 1e-4, 1e-2)).guarantee(adjacency).epsilon

    once = 1000 * (bound + 18 * 1e-8) + c_alpha(18.0, DELTA)
    assert found.epsilon >= once - 1e-9
    if beta < 0.2 or adjacency == "zero_out":
        assert found.epsilon == pytest.approx(stated(beta), rel=1e-12)
    if adjacency == "zero_out":
        assert stated(found.largest_leakage) <= 8.0 < stated(found.largest_leakage * 1.001)
    elif beta < 0.2:
        # Two zero-outs of ε/2, with the largest δ' such that (1 + e^(ε/2)) δ' is at most δ.
        share = DELTA / (1 + math.exp(found.epsilon / 2))
        spent = 1000 * (bound + 18 * 1e-8)
        assert spent + c_alpha(18.0, share) == pytest.approx(found.epsilon / 2, rel=1e-9)
        assert found.largest_leakage < adapmixed_beforehand(8.0, DELTA, 100, 1000).largest_leakage


def test_adapmixed_beforehand_as_the_documentation_says():
    """The numbers are those of "What can be said in advance" in docs/theory/adapmixed.md."""
    found = adapmixed_beforehand(1.0, DELTA, 64, 508)
    assert format_epsilon(found.epsilon) == "1705"
    assert four_digits(found.largest_leakage, ROUND_FLOOR) == "0.002559"


def test_adapmixed_beforehand_where_nothing_bounds_it():
    assert adapmixed_beforehand(0.4, DELTA, 64, 508).largest_leakage is None  # c_18 is 0.45
    for way in ("add_remove", "swap"):
        with pytest.raises(ValueError, match="adjacency must be one of"):
            adapmixed_beforehand(1.0, DELTA, 64, 508, way)
    with pytest.raises(ValueError, match="order must be"):
        adapmixed_beforehand(1.0, DELTA, 64, 508, order=1.0)
