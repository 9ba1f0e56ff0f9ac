"""ε of μ-Gaussian differential privacy."""

from __future__ import annotations

import math
from functools import lru_cache

_LARGEST = 700.0  # e^ε stays finite in float64 up to here; beyond it nothing is stated
_LEAST = 1e-290
_ERROR = 2.0**-50  # relative error of erfc and of one product, in a unit of 1 + argument^2


@lru_cache(maxsize=1024)
def gdp_to_dp(mu: float, delta: float) -> float:
    """Return the ε at `delta` of μ-Gaussian DP, rounded up.

    (ε, δ) holds iff Φ(μ/2 - ε/μ) - e^ε Φ(-μ/2 - ε/μ) <= δ (Dong, Roth and Su 2022), as
    docs/theory/bounded-range.md uses it.

    Args:
        mu: μ ≥ 0; +inf allowed.
        delta: δ in [1e-15, 0.1].

    Returns:
        ε ≥ 0; +inf if it exceeds 700.
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu) or _delta(mu, _LARGEST) > delta:
        return math.inf
    low, high = 0.0, _LARGEST
    if _delta(mu, low) <= delta:
        return low
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if _delta(mu, middle) <= delta else (middle, high)
    return high


def _delta(mu: float, epsilon: float) -> float:
    """Return the left side of the condition, rounded up."""
    return _normal(epsilon / mu - mu / 2, 1) - math.exp(epsilon) * _normal(
        epsilon / mu + mu / 2, -1
    )


def _normal(x: float, side: int) -> float:
    """Return Φ(-x), rounded up for side 1 and down for side -1."""
    found = math.erfc(x / math.sqrt(2)) / 2 * (1 + side * _ERROR * (8 + x * x))
    if found < _LEAST:  # where doubles lose digits
        return _LEAST if side > 0 else 0.0
    return found
