"""From counts to statements that hold with a stated confidence."""

from __future__ import annotations

import math

from scipy.stats import beta, binom, chi2, norm

CONFIDENCE = 0.999


def proportion(hits: int, draws: int, confidence: float) -> tuple[float, float]:
    """Clopper–Pearson: each end alone holds with this confidence."""
    low = beta.ppf(1 - confidence, hits, draws - hits + 1) if hits > 0 else 0.0
    high = beta.ppf(confidence, hits + 1, draws - hits) if hits < draws else 1.0
    return float(low), float(high)


def least_epsilon(
    here: tuple[int, int], there: tuple[int, int], delta: float, confidence: float = CONFIDENCE
) -> float:
    """An event of (hits, draws) in the two worlds: ε is at least this, or 0, at this δ.

    For one event that was chosen before the draws: P <= e^ε Q + δ, both ends at half the error.
    """
    each = 1 - (1 - confidence) / 2
    low, high = proportion(*here, each)[0], proportion(*there, each)[1]
    return math.log((low - delta) / high) if low - delta > high else 0.0


def least_shift(
    here: tuple[int, int], there: tuple[int, int], confidence: float = CONFIDENCE
) -> float:
    """N(0, 1) against N(shift, 1) must be at least so far apart to allow for this event."""
    each = 1 - (1 - confidence) / 2
    low, high = proportion(*here, each)[0], proportion(*there, each)[1]
    return max(0.0, float(norm.ppf(low) - norm.ppf(high)))


def gaussian_epsilon(shift: float, delta: float) -> float:
    """The least ε >= 0 at which N(0, 1) and N(shift, 1) are (ε, δ)-close (Balle and Wang 2018)."""

    def exceeds(epsilon: float) -> bool:
        tail = norm.logcdf(-shift / 2 - epsilon / shift) + epsilon
        return float(norm.cdf(shift / 2 - epsilon / shift) - math.exp(tail)) > delta

    if shift <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while exceeds(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high if exceeds(0.0) else 0.0


def chi_square(counts: list[int], law: list[float]) -> tuple[float, int]:
    """(the statistic, degrees of freedom); the rarest tokens share a cell expected >= 5 times."""
    draws, cells = sum(counts), []
    seen, expected = 0.0, 0.0
    for probability, count in sorted(zip(law, counts, strict=True)):
        seen, expected = seen + count, expected + draws * probability
        if expected >= 5:
            cells.append((seen, expected))
            seen, expected = 0.0, 0.0
    if expected > 0 and cells:
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + expected)
    return sum((seen - e) ** 2 / e for seen, e in cells), len(cells) - 1


def chi_square_limit(freedom: int, confidence: float = CONFIDENCE) -> float:
    """What the statistic stays below with this confidence."""
    return float(chi2.ppf(confidence, freedom))


def binomial_deviation(hits: int, draws: int, probability: float) -> float:
    """1 - the two-sided p-value: how sure one is that this is not the probability."""
    tail = min(binom.cdf(hits, draws, probability), binom.sf(hits - 1, draws, probability))
    return 1 - min(1.0, 2 * float(tail))
