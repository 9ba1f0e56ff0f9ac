"""Confidence bounds cover as often as they say; the Gaussian's numbers agree with others."""

import math

import numpy as np
import pytest

from adapmixed.audit.statistics import (
    binomial_deviation,
    chi_square,
    chi_square_limit,
    gaussian_epsilon,
    least_epsilon,
    least_shift,
    proportion,
)


def test_clopper_pearson_against_binomial_tails() -> None:
    low, high = proportion(3, 20, 0.99)
    tail = math.fsum(math.comb(20, k) * low**k * (1 - low) ** (20 - k) for k in range(3, 21))
    assert tail == pytest.approx(0.01, rel=1e-9)
    tail = math.fsum(math.comb(20, k) * high**k * (1 - high) ** (20 - k) for k in range(4))
    assert tail == pytest.approx(0.01, rel=1e-9)
    assert proportion(0, 20, 0.99) == (0.0, pytest.approx(1 - 0.01**0.05))
    assert proportion(20, 20, 0.99) == (pytest.approx(0.01**0.05), 1.0)


@pytest.mark.parametrize(("p", "q", "delta"), [(0.3, 0.1, 0.0), (0.02, 0.005, 0.003)])
def test_least_epsilon_exceeds_the_truth_as_rarely_as_stated(
    p: float, q: float, delta: float
) -> None:
    generator, draws, true = np.random.default_rng(1), 2000, math.log((p - delta) / q)
    hits = zip(generator.binomial(draws, p, 800), generator.binomial(draws, q, 800), strict=True)
    found = [least_epsilon((int(a), draws), (int(b), draws), delta, 0.9) for a, b in hits]
    assert np.mean(np.array(found) > true) <= 0.1
    assert np.mean(found) > 0.25 * true
    assert least_epsilon((5, 100), (90, 100), delta) == 0.0


def test_least_shift() -> None:
    draws = 10**6
    here, there = round(draws * 0.8413447), round(draws * 0.5)
    assert least_shift((here, draws), (there, draws)) == pytest.approx(1.0, abs=0.02)
    assert least_shift((there, draws), (here, draws)) == 0.0


@pytest.mark.parametrize("shift", [0.01, 0.5, 2.0])
def test_epsilon_of_a_gaussian_against_its_definition(shift: float) -> None:
    from dp_accounting.dp_event import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant().compose(GaussianDpEvent(1 / shift))
    expected = accountant.get_epsilon(0.001)
    assert gaussian_epsilon(shift, 0.001) == pytest.approx(expected, abs=2e-4)
    assert gaussian_epsilon(0.0, 0.001) == 0.0


def test_chi_square_and_its_limit() -> None:
    assert chi_square([55, 45], [0.5, 0.5]) == (pytest.approx(1.0), 1)
    # Cells are merged until five draws are expected in each.
    assert chi_square([1, 2, 97], [0.01, 0.01, 0.98])[1] == 0
    assert chi_square_limit(1) == pytest.approx(10.828, abs=1e-3)


def test_binomial_deviation() -> None:
    assert binomial_deviation(10, 20, 0.5) == 0.0
    assert binomial_deviation(0, 20, 0.5) == pytest.approx(1 - 2**-19)
