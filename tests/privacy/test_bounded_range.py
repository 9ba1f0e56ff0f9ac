"""ClippedLogPool's range holds what rounding adds, where nothing else would cover it."""

import itertools
import math

import mpmath
import numpy as np
import pytest

from adapmixed.privacy import bounded_range_rho, individual_rho
from adapmixed.privacy.bounded_range import RANGE_ERROR, range_rounding

SETTINGS = list(itertools.product([1e-6, 0.5, 2.0, 300.0], [0.0, 1e-9, 0.25, 40.0], [1e-9, 3.0]))


@pytest.mark.parametrize(("scale", "lower", "upper"), SETTINGS)
def test_the_operators_bound_is_held_twice(scale, lower, upper):
    """2^-49 (1 + κ max(-a, b) + L) with L = 750: csrc/core/log_pool.h."""
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
        for adjacency, factor in (("zero_out", 1), ("add_remove", 2), ("replace_one", 2)):
            found = bounded_range_rho(scale, -lower, upper, num_models, adjacency)
            other = mpmath.mpf(0)  # grid, of the u_i of one model more
            if adjacency == "add_remove" and (num_models + 1) * max(lower, upper) >= 2**11:
                other = mpmath.mpf(scale) * (num_models + 1) * max(lower, upper) / 2**48
            least = (factor * (widened + added) + other) ** 2 / 8
            assert least * (1 - mpmath.mpf(2) ** -50) <= found <= least * (1 + 2.0**-40)
        spans = np.array([0.0, 1e-12, lower + upper])
        charged = individual_rho(spans, scale, -lower, upper, num_models)
        for span, rho in zip(spans.tolist(), charged.tolist(), strict=True):
            eta = mpmath.mpf(scale) * mpmath.mpf(span) / num_models
            least = (eta * (1 + mpmath.mpf(RANGE_ERROR)) + added) ** 2 / 8
            assert least * (1 - mpmath.mpf(2) ** -50) <= rho <= least * (1 + 2.0**-40)


def unit(lower, upper, num_models):
    """Spacing of the u_i, as csrc/core/log_pool.h chooses it."""
    exponent = math.frexp(num_models * max(-lower, upper))[1]
    return 2.0 ** -min(40, 51 - exponent)


@pytest.mark.parametrize("upper", [0.25, 1.0, 3.0, 1000.0])
def test_another_number_of_models_may_have_another_grid(upper):
    """All others' u_i may then round otherwise: what that adds to the range is charged."""
    changes = 0
    for power in range(1, 25):
        crossing = int(2**power / max(0.25, upper))
        for num_models in range(max(2, crossing - 1), max(2, crossing) + 3):
            for other in (num_models - 1, num_models + 1):
                units = [unit(-0.25, upper, number) for number in (num_models, other)]
                changes += units[0] != units[1]
                moved = 2 * 1.5 * sum(units) / 2 if units[0] != units[1] else 0.0
                rho = bounded_range_rho(1.5, -0.25, upper, num_models, "add_remove")
                bare = bounded_range_rho(1.5, -0.25, upper, num_models, "replace_one")
                gained = math.sqrt(8 * rho) - math.sqrt(8 * bare)
                assert gained >= moved * (1 - 1e-9) - 1e-15 * math.sqrt(rho), (num_models, other)
                known = {"constant_models": True}
                kept = bounded_range_rho(1.5, -0.25, upper, num_models, "add_remove", **known)
                assert kept == bounded_range_rho(1.5, -0.25, upper, num_models, "zero_out")
    assert changes > 8
