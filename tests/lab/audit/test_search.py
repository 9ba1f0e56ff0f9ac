"""Divergences by hand; confidence bounds cover as often as stated."""

import math

import numpy as np
import pytest

from adapmixed_lab.audit import search
from adapmixed_lab.audit.search import (
    chi_square,
    chi_square_limit,
    least_epsilon,
    least_shift,
    one_run_epsilon,
    one_run_p_value,
    proportion,
)


def test_divergences_of_the_search() -> None:
    p, q = np.array([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0]]), np.array([[0.5, 0.5, 0.0], [1.0, 0, 0]])
    assert search.renyi(p, q, 2.0).tolist() == [pytest.approx(math.log(1.04)), math.inf]
    assert search.hockey_stick(p, q, 0.0).tolist() == [pytest.approx(0.1), 0.5]
    near = search.renyi(q[:1] + [[1e-7, -1e-7, 0.0]], q[:1], 3.0)
    assert near[0] == pytest.approx(3 / 2 * 4e-14, rel=1e-3)


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
    epsilons = [least_epsilon((int(a), draws), (int(b), draws), delta, 0.9) for a, b in hits]
    assert np.mean(np.array(epsilons) > true) <= 0.1
    assert np.mean(epsilons) > 0.25 * true
    assert least_epsilon((5, 100), (90, 100), delta) == 0.0


def test_least_shift() -> None:
    draws = 10**6
    here, there = round(draws * 0.8413447), round(draws * 0.5)
    assert least_shift((here, draws), (there, draws)) == pytest.approx(1.0, abs=0.02)
    assert least_shift((there, draws), (here, draws)) == 0.0


def test_chi_square_and_its_limit() -> None:
    assert chi_square([55, 45], [0.5, 0.5]) == (pytest.approx(1.0), 1)
    # Cells are merged until 25 draws are expected in each.
    assert chi_square([1, 2, 97], [0.01, 0.01, 0.98])[1] == 0
    # Equally likely tokens are not sorted by their counts before they are merged.
    assert chi_square([0, 25, 0, 25, 200, 250], [0.025] * 4 + [0.4, 0.5]) == (0.0, 3)


def test_chi_square_errs_no_more_often_than_stated() -> None:
    assert chi_square_limit(1) == pytest.approx(12.116, abs=1e-3)
    generator = np.random.default_rng(0)
    for cells in (2, 12, 64):
        counts = generator.poisson(25, (100_000, cells))
        above = ((counts - 25) ** 2 / 25).sum(1) > chi_square_limit(cells)
        assert above.mean() < 1e-3


def test_one_run_against_published_numbers_and_closed_forms() -> None:
    # Steinke, Nasr, Jagielski 2023, appendix D and section 7, as printed there.
    assert one_run_epsilon(1000, 100, 75, 1e-4, 0.95) == pytest.approx(0.673, abs=1e-3)
    assert one_run_epsilon(100_000, 1510, 1439, 1e-5, 0.95) == pytest.approx(2.675, abs=1e-3)
    # All right at δ = 0: accuracy^r = 1 - confidence.
    accuracy = 0.001 ** (1 / 40)
    expected = math.log(accuracy / (1 - accuracy))
    assert one_run_epsilon(64, 40, 40, 0.0) == pytest.approx(expected, rel=1e-9)
    assert one_run_epsilon(64, 9, 9, 0.0) == 0.0
    assert one_run_p_value(50, 20, 0, 1.0, 1e-3) == 1.0


def test_one_run_delta_by_hand() -> None:
    accuracy, r, v, m, delta = math.e / (1 + math.e), 12, 10, 30, 1e-3
    mass = [math.comb(r, k) * accuracy**k * (1 - accuracy) ** (r - k) for k in range(r + 1)]
    largest = max(math.fsum(mass[v - i : v]) / i for i in range(1, v + 1))
    expected = math.fsum(mass[v:]) + 2 * m * delta * largest
    assert one_run_p_value(m, r, v, 1.0, delta) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("delta", [0.0, 1e-4])
@pytest.mark.slow
def test_one_run_covers_and_is_tight_for_randomised_response(delta: float) -> None:
    """A coin is revealed with probability δ, else told rightly with probability e/(1 + e)."""
    generator, coins = np.random.default_rng(2), 5000
    accuracy = delta + (1 - delta) * math.e / (1 + math.e)
    epsilons = [
        one_run_epsilon(coins, coins, int(right), delta, 0.9)
        for right in generator.binomial(coins, accuracy, 60)
    ]
    assert np.mean(np.array(epsilons) > 1.0) <= 0.2  # 0.1 plus 2.6 standard deviations of 60 trials
    assert 0.9 < np.mean(epsilons) < 1.0
