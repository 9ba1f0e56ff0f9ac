"""ε at a given δ of a privacy loss distribution on a grid of losses k · interval, rounded up."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_INDEX_BITS, _DIGITS = 27, 26  # the product of an index and an interval of these bits is exact
_ROUNDING = 2.0**-46
"""Rounding of the sum in δ(ε), relative to the sum of its terms' magnitudes. Below 2^24 terms,
pairwise summation errs by less than 45 · 2^-53 of that sum, and each term by less than 16 · 2^-53
of itself."""


def short_interval(least: float) -> float:
    """Return the least float64 >= `least` that has 26 significant bits.

    Its multiples by integers below 2^27 are exact, so the losses on such a grid are exact; see
    "How ε is computed" in docs/theory/clipped-mixing.md.
    """
    mantissa, exponent = math.frexp(least)
    return math.ldexp(math.ceil(math.ldexp(mantissa, _DIGITS)), exponent - _DIGITS)


def smallest_epsilon(
    masses: NDArray[np.float64], first: int, interval: float, infinite: float, delta: float
) -> float:
    """Return an ε >= 0 for which δ(ε) <= delta holds in spite of rounding.

    δ(ε) = infinite + Σ_{l > ε} p(l) (1 - e^{ε - l}) is the hockey stick of
    docs/theory/clipped-mixing.md at γ = e^ε. It is evaluated, rounded up, at the ε that is
    returned, whatever search found it. If no mass is negative and the interval is below 700, that ε
    is the smallest but for rounding.

    Args:
        masses: p, (n,) float64, n <= 2^24. Negative noise is summed unchanged.
        first: the losses are l = (first + j) · interval for j = 0 ... n - 1.
        interval: distance of the losses, > 0, from `short_interval`.
        infinite: p(+inf), the mass of an infinite loss.
        delta: δ > 0.

    Returns:
        ε. It is +inf if `infinite` alone exceeds delta. It is also +inf if a mass is not finite,
        if there are more than 2^24 masses, or if a loss lies beyond 2^27 intervals.

    Raises:
        ValueError: the interval has more than 26 significant bits.
    """
    if interval != short_interval(interval):
        raise ValueError(f"interval must have 26 significant bits, got {interval!r}")
    last = first + len(masses) - 1
    exact = max(abs(first), abs(last)) < 2**_INDEX_BITS and len(masses) <= 2**24
    if not (exact and np.isfinite(masses).all() and infinite < math.inf):
        return math.inf
    skipped = max(0, 1 - first)  # losses <= 0 contribute to δ(ε) at no ε >= 0
    masses, first = masses[skipped:], first + skipped
    losses = np.arange(first, last + 1, dtype=np.float64) * interval

    def sums(epsilon: float) -> tuple[float, float]:
        """Return δ(ε), rounded up, and -δ'(ε) = Σ_{l > ε} p(l) e^{ε - l}."""
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
