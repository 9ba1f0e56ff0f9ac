"""The noise of counts: its law, at small and at huge σ, and what a shift of it costs."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.stats import chi2

from adapmixed.privacy import FilterBudget, PerModelFilter
from adapmixed.privacy.discrete_gaussian import discrete_gaussian
from adapmixed.rng import SecureRandom, SeededRandom

DRAWS = 20_000


def law(sigma: float) -> dict[int, float]:
    with mpmath.workdps(40):
        reach = math.ceil(12 * sigma) + 2
        weights = {
            z: mpmath.exp(-(mpmath.mpf(z) ** 2) / (2 * mpmath.mpf(sigma) ** 2))
            for z in range(-reach, reach + 1)
        }
        total = mpmath.fsum(weights.values())
        return {z: float(weight / total) for z, weight in weights.items()}


def differs(found: list[int], expected: dict[int, float]) -> float:
    """P(a χ² as large); what is expected less than 8 times counts together."""
    counts, pairs, rest = Counter(found), [], [0.0, 0.0]
    for z, p in expected.items():
        if p * len(found) >= 8:
            pairs.append((counts[z], p * len(found)))
        else:
            rest = [rest[0] + counts[z], rest[1] + p * len(found)]
    if rest[1] > 1:
        pairs.append((int(rest[0]), rest[1]))
    statistic = math.fsum((n - e) ** 2 / e for n, e in pairs)
    return float(chi2.sf(statistic, len(pairs) - 1))


@pytest.mark.parametrize("sigma", [0.35, 0.5, 1.0, 1.9, 3.0, 7.5])
@pytest.mark.parametrize("source", [SeededRandom(1), SecureRandom()], ids=["seeded", "secure"])
def test_the_law(sigma: float, source: Any) -> None:
    found = [discrete_gaussian(sigma, source.bits) for _ in range(DRAWS)]
    assert differs(found, law(sigma)) > 1e-6
    wider = law(1.1 * sigma)
    assert differs(found, wider) < 1e-6  # the test would see another σ


def test_small_noise_is_not_that_of_rounded_normals() -> None:
    """Box and Muller's normals end at 8.57 σ: then a release tells one count from the other."""
    budget = FilterBudget("zcdp", 17.6, 1e-5, releases=1, sigma=0.17)
    source = SeededRandom(3)

    def releases(count: int) -> list[int]:
        found = []
        for _ in range(40_000):
            model_filter = PerModelFilter(1, budget)
            model_filter.admit(np.array([[0.2 * count]]))
            found.append(model_filter.noisy_count(0.1, rng=source))
        return found

    for count in (0, 1):
        found = Counter(releases(count))
        # P(|z| = 1) is 6.1e-8, of 2 nothing: N(0, 0.17²) rounded would have moved 3.3e-3.
        assert set(found) <= {count - 1, count, count + 1} and found[count] > 39_990


@pytest.mark.parametrize("sigma", [1e8, 1e16, 1e300])
def test_huge_noise_is_of_all_residues(sigma: float) -> None:
    source = SeededRandom(5)
    found = [discrete_gaussian(sigma, source.bits) for _ in range(4_000)]
    deviation = math.sqrt(sum(Fraction(z) ** 2 for z in found) / len(found) / Fraction(sigma) ** 2)
    assert deviation == pytest.approx(1, abs=0.06)
    uniform = dict.fromkeys(range(8), 1 / 8)
    assert differs([z % 8 for z in found], uniform) > 1e-6


@pytest.mark.parametrize("sigma", [5e-324, 1e-170, 1e-3])
def test_tiny_noise_is_none(sigma: float) -> None:
    source = SeededRandom(6)
    assert {discrete_gaussian(sigma, source.bits) for _ in range(200)} == {0}


@pytest.mark.parametrize("sigma", [0.17, 0.3, 0.5, 1.0, 4.0])
def test_a_release_reserves_what_a_shift_costs(sigma: float) -> None:
    """D_α of the law and itself moved by 1, at whole α exactly α/(2σ²), is never above that."""
    with mpmath.workdps(60):
        variance = 2 * mpmath.mpf(sigma) ** 2
        # Far beyond what counts at the largest order, whose terms are largest at z = 1 - α.
        places = range(-400, 401)
        total = mpmath.fsum(mpmath.exp(-(mpmath.mpf(z) ** 2) / variance) for z in places)
        for order in (1.5, 2.0, 8.0, 40.0):
            budget = FilterBudget("renyi", 1e4, 1e-5, order, releases=1, sigma=sigma)
            power = mpmath.mpf(order)
            terms = [
                mpmath.exp(-(power * z**2 + (1 - power) * mpmath.mpf(z - 1) ** 2) / variance)
                for z in places
            ]
            divergence = mpmath.log(mpmath.fsum(terms) / total) / (power - 1)
            assert divergence <= mpmath.mpf(budget.reserved) + mpmath.mpf(10) ** -50
            if order == int(order):
                assert divergence >= mpmath.mpf(budget.reserved) * (1 - mpmath.mpf(2) ** -46)


def test_bad_sigma() -> None:
    for sigma in (0.0, math.inf, -1.0, math.nan):
        with pytest.raises(ValueError, match="sigma must be"):
            discrete_gaussian(sigma, SeededRandom(0).bits)
