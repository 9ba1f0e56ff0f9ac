"""ε at a δ of a privacy loss distribution on a grid of losses k · interval, rounded up."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_INDEX_BITS, _DIGITS = 27, 26  # a product of an index and an interval of so many bits is exact
_ROUNDING = 2.0**-46
"""Of the sum in δ(ε), relative to the sum of its terms' magnitudes: below 2^24 terms pairwise
summation errs by less than 45 · 2^-53 of it, each term by less than 16 · 2^-53 of itself."""


def short_interval(least: float) -> float:
    """The least float64 >= `least` of 26 significant bits: its multiples below 2^27 are exact.

    Of a grid on which losses are exact: docs/privacy.md, section 11, "Numbers".
    """
    mantissa, exponent = math.frexp(least)
    return math.ldexp(math.ceil(math.ldexp(mantissa, _DIGITS)), exponent - _DIGITS)


def smallest_epsilon(
    masses: NDArray[np.float64], first: int, interval: float, infinite: float, delta: float
) -> float:
    """An ε >= 0 with δ(ε) = infinite + Σ_{l > ε} p(l) (1 - e^{ε - l}) <= delta, for certain.

    δ(ε) is the hockey stick of docs/privacy.md, section 11, at γ = e^ε; it is evaluated rounded up
    at the ε that is returned, however that was found. The ε is the smallest one but for rounding
    if no mass is negative and the interval is below 700.

    Args:
        masses: p, (n,) float64, n <= 2^24; noise below 0 is summed as it is.
        first: the losses are l = (first + j) · interval, j = 0 ... n - 1.
        interval: > 0, from `short_interval`.  infinite: p(+inf).  delta: > 0.

    Returns:
        float; +inf where `infinite` alone is above delta, and where nothing can be stated: a mass
        that is not finite, more than 2^24 of them, or a loss beyond 2^27 intervals.

    Raises:
        ValueError: an interval of more than 26 significant bits.
    """
    if interval != short_interval(interval):
        raise ValueError(f"interval must have 26 significant bits, got {interval!r}")
    last = first + len(masses) - 1
    exact = max(abs(first), abs(last)) < 2**_INDEX_BITS and len(masses) <= 2**24
    if not (exact and np.isfinite(masses).all() and infinite < math.inf):
        return math.inf
    skipped = max(0, 1 - first)  # losses <= 0 count at no ε >= 0
    masses, first = masses[skipped:], first + skipped
    losses = np.arange(first, last + 1, dtype=np.float64) * interval

    def sums(epsilon: float) -> tuple[float, float]:
        """δ(ε) rounded up, and -δ'(ε) = Σ_{l > ε} p(l) e^{ε - l}."""
        start = int(np.searchsorted(losses, epsilon, side="right"))
        above, mass = epsilon - losses[start:], masses[start:]
        terms = -np.expm1(above) * mass
        rounding = _ROUNDING * float(np.abs(terms).sum())
        found = (infinite + float(terms.sum()) + rounding) * (1 + 2.0**-50)
        return found, float((np.exp(above) * mass).sum())

    if sums(0.0)[0] <= delta:
        return 0.0
    if not infinite * (1 + 2.0**-50) <= delta:
        return math.inf
    low, high = 0, last  # in intervals: δ(low) > delta >= δ(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sums(middle * interval)[0] > delta else (low, middle)
    start, end = low * interval, high * interval
    # Between two losses δ(ε) = δ(start) - expm1(ε - start) Σ p(l) e^{start - l}.
    beyond, slope = sums(start)
    epsilon = start + math.log1p((beyond - delta) / slope) if slope > 0 else end
    step = math.ulp(end)
    while epsilon < end:
        if sums(epsilon)[0] <= delta:
            return epsilon
        epsilon, step = epsilon + step, 2 * step
    return end
