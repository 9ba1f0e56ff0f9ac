"""ε of many answers whose log-ratio has a bounded range.

One answer has range η if log(p/p') lies in an interval of length η for the distributions p and p'
of neighbours. docs/theory/bounded-range.md proves the two bounds that this module takes the smaller
one of: a Gaussian one for any number of answers, and the exact optimum of all adaptive adversaries
for few of them.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.conversions import gdp_to_dp, zcdp_to_dp
from adapmixed.privacy.rounding import times_up, up

FEW = 512
"""Largest number of answers for which the optimum is computed, in less than half a second."""

_SPANS = (1e-12, 50.0)  # ranges for which rounding stays far below the errors of the grid
_LARGEST = 600.0  # largest log m on the grid, so that m stays finite in float64
_STEP_ERROR = 2.0**-44  # relative error of one step of the programme, from some tens of roundings


def bounded_range_epsilon(span: float, queries: int, delta: float, *, few: int = FEW) -> float:
    """Return ε of `queries` answers, each of range `span`, in both orders of the neighbours.

    The contexts may depend on earlier answers, and so may the decision to stop early. The bounds
    are those of docs/theory/bounded-range.md.

    Args:
        span: η ≥ 0, in nats.
        queries: T ≥ 0, fixed in advance.
        delta: δ in [1e-15, 0.1].
        few: largest T for which the optimum is computed.

    Returns:
        ε ≥ 0, rounded up. It is never above that of η²/8-zCDP, nor above T η.
    """
    if span == 0 or queries == 0:
        return 0.0
    rho = times_up(queries, up(span * span / 8))
    bound = min(times_up(queries, span), adaptive_epsilon(rho, up(span * span / 8), delta))
    if queries <= few:
        bound = min(bound, _optimum(span, queries, delta))
    return bound


@lru_cache(maxsize=1024)
def adaptive_epsilon(rho: float, largest: float, delta: float) -> float:
    """Return ε of answers whose ranges may depend on earlier answers, rounded up.

    With s = 2 rho the sum of all η_t²/4, and h = 2 largest that of one answer at most, the answers
    are μ-Gaussian DP for μ² = s + h (5/2 + log(1 + s/h)) (docs/theory/bounded-range.md).

    Args:
        rho: ≥ 0, upper bound of Σ η_t²/8; +inf allowed.
        largest: > 0, upper bound of every η_t²/8; +inf allowed.
        delta: δ in [1e-15, 0.1].

    Returns:
        ε ≥ 0, never above that of rho-zCDP.
    """
    if rho == 0:
        return 0.0
    zcdp, largest = zcdp_to_dp(rho, delta)[0], min(largest, rho)
    if math.isinf(rho + largest):
        return zcdp
    mean_square = up(up(2 * rho) + 2 * largest * up(2.5 + up(math.log1p(up(rho / largest)))))
    return min(zcdp, gdp_to_dp(up(math.sqrt(up(mean_square))), delta))


@lru_cache(maxsize=1024)
def _optimum(span: float, queries: int, delta: float) -> float:
    """Return ε at `delta` of the worst adaptive adversary; +inf if it lies beyond the grid."""
    if not _SPANS[0] <= span <= _SPANS[1]:
        return math.inf
    deviations = 3 + math.sqrt(-2 * math.log(delta))
    wide = math.ceil(deviations * math.sqrt(queries) / 2 + queries * span / 8) + 1
    wide = min(queries, wide)
    if (wide + 1) * span > _LARGEST:
        return math.inf
    cells = 64 if queries <= 16 else 16
    value, point = _worst_price(span, queries, wide, cells)
    # δ(ε) = V(m)/m at m = e^-ε. V is linear between grid points, so δ is linear in e^ε.
    found = (value / point)[: len(point) // 2 + 1][::-1] * (1 + 2.0**-40)
    if found[0] <= delta:
        return 0.0
    enough = found <= delta
    if not enough.any():
        return math.inf
    at = int(enough.argmax())
    ratio = 1 / point[len(point) // 2 - at + 1], 1 / point[len(point) // 2 - at]
    share = (found[at - 1] - delta) / (found[at - 1] - found[at])
    return float(math.log(ratio[0] + share * (ratio[1] - ratio[0])) * (1 + 2.0**-40) + 2.0**-40)


def _worst_price(
    span: float, queries: int, wide: int, cells: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return upper bounds of V_0 on a grid of m, and the grid, with |log m| <= wide η.

    `cells` grid points of log m lie in a range η.

    V_T(m) = (m - 1)_+, and V_t(m) is the largest value at m of a chord of V_{t+1} from b to e^η b
    with b <= m <= e^η b.

    A chord between grid points is exact. Where b lies between two grid points, the chord's value
    is c0 + c1 b + c2/b. It exceeds the larger one of its values at the two by at most
    max |second derivative| (distance)²/8, which is added.
    """
    step = span / cells
    reach = wide * cells
    point = np.exp(np.arange(-reach, reach + 1) * step)
    value = np.maximum(np.expm1(np.arange(-reach, reach + 1) * step), 0.0)
    growth = math.expm1(step)
    below = np.exp(np.arange(-cells, 0) * step)
    above = point[-1] * np.expm1(np.arange(1, cells + 1) * step)
    upward = [
        -math.expm1(-back * step) / (math.exp(-back * step) * math.expm1(span))
        for back in range(cells + 1)
    ]
    bend = [growth**2 / 4 * math.exp(back * step) / math.expm1(span) for back in range(cells + 1)]
    count = len(value)
    for _ in range(queries):
        # Beyond the grid: V <= V(m_0) m/m_0 below it, as V(0) = 0, and V(m_0) + m - m_0 above it.
        wider = np.concatenate([value[0] * below, value, value[-1] + above])
        intercept = wider[:-1] - np.diff(wider) / growth
        intercept = np.append(intercept, intercept[-1])
        best, chord = value, value  # b = m
        for back in range(1, cells + 1):
            low = slice(cells - back, cells - back + count)
            high = slice(2 * cells - back, 2 * cells - back + count)
            before = chord
            chord = upward[back] * wider[high] + (1 - upward[back]) * wider[low]
            curved = np.maximum(intercept[low] - intercept[high], 0.0)
            best = np.maximum(best, np.maximum(before, chord) + bend[back] * curved)
        value = best * (1 + _STEP_ERROR)
    return value, point
