"""Confidence bounds and tests from counts."""

from __future__ import annotations

import math

import numpy as np
import scipy  # it loads scipy.stats on its first use

from adapmixed_lab.audit.search import last

CONFIDENCE = 0.999


def proportion(hits: int, draws: int, confidence: float) -> tuple[float, float]:
    """Return the Clopper–Pearson interval; each end alone holds with this confidence."""
    low = scipy.stats.beta.ppf(1 - confidence, hits, draws - hits + 1) if hits > 0 else 0.0
    high = scipy.stats.beta.ppf(confidence, hits + 1, draws - hits) if hits < draws else 1.0
    return float(low), float(high)


def _ends(here: tuple[int, int], there: tuple[int, int], confidence: float) -> tuple[float, float]:
    """Return the least proportion here and the largest there, each with half of the error."""
    each = 1 - (1 - confidence) / 2
    return proportion(*here, each)[0], proportion(*there, each)[1]


def least_epsilon(
    here: tuple[int, int], there: tuple[int, int], delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound on ε at this δ, 0 if the counts show nothing.

    From P <= e^ε Q + δ, with both ends at half the error. The event must be chosen before the
    draws.

    Args:
        here, there: (hits, draws) of the event in the two worlds.
    """
    low, high = _ends(here, there, confidence)
    return math.log((low - delta) / high) if low - delta > high else 0.0


def least_shift(
    here: tuple[int, int], there: tuple[int, int], confidence: float = CONFIDENCE
) -> float:
    """Return how far apart N(0, 1) and N(shift, 1) must at least be to allow for this event."""
    low, high = _ends(here, there, confidence)
    return max(0.0, float(scipy.stats.norm.ppf(low) - scipy.stats.norm.ppf(high)))


def chi_square(counts: list[int], shares: list[float]) -> tuple[float, int]:
    """Return (statistic, degrees of freedom); rare tokens share cells of >= 25 expected draws.

    Which tokens share a cell depends on the shares and their places alone, never on their counts.
    """
    draws, cells = sum(counts), []
    seen, expected = 0.0, 0.0
    for probability, count in sorted(zip(shares, counts, strict=True), key=lambda pair: pair[0]):
        seen, expected = seen + count, expected + draws * probability
        if expected >= 25:
            cells.append((seen, expected))
            seen, expected = 0.0, 0.0
    if expected > 0 and cells:
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + expected)
    return sum((seen - e) ** 2 / e for seen, e in cells), len(cells) - 1


def chi_square_limit(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return the value that the statistic of `chi_square` stays below with this confidence.

    Counts of few expected draws have longer tails than normal ones, so only half of the error is
    used. One or two cells of 25 expected draws, beside a large one, are above the limit for 0.001
    with probability 0.00092 at most; more cells or draws less often.
    """
    return float(scipy.stats.chi2.isf((1 - confidence) / 2, freedom))


def binomial_deviation(hits: int, draws: int, probability: float) -> float:
    """Return 1 - the two-sided p-value: the confidence that this is not the probability."""
    return 1 - float(scipy.stats.binomtest(hits, draws, probability).pvalue)


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of so many right guesses under (epsilon, delta)-DP.

    Theorem 5.2 of Steinke, Nasr and Jagielski 2023. Each of m canaries is in or out by a fair coin
    of its own. From the output, r of the coins are guessed. The mechanism is (ε, δ)-DP if one coin
    is turned. With W ~ Binomial(r, e^ε/(1 + e^ε)),

        P[v or more are right] <= P[W >= v] + 2 m δ max_{i = 1..v} P[v > W >= v - i] / i.

    Args:
        canaries: m >= guesses.
        guesses: r, fixed in advance; the attacker abstains on the other coins.
        right: v in [0, r].
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(scipy.stats.binom.sf(right - 1, guesses, accuracy))
    if delta == 0 or right == 0:
        return tail
    # Terms further below vanish in float64, so the maximum is not among them.
    reach = right - guesses * accuracy + 40 * math.sqrt(guesses * accuracy * (1 - accuracy)) + 1000
    steps = np.arange(1, max(1, min(right, math.ceil(reach))) + 1)
    below = np.cumsum(scipy.stats.binom.pmf(right - steps, guesses, accuracy))
    return min(1.0, tail + 2 * canaries * delta * float((below / steps).max()))


def one_run_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound on ε at this δ from `right` guesses, 0 if they show nothing.

    See `one_run_p_value`.
    """

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    return last(refuted) if refuted(0.0) else 0.0
