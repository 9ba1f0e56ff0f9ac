"""Search for the largest setting whose cost stays within a target, for the planner."""

import math
from collections.abc import Callable

LEAST = 1e-9
"""The smallest size that is tried."""
FIT = 5e-4
"""Relative width at which the search ends."""


def largest_within(
    cost: Callable[[float], float], target: float, most: float, start: float = 0.1
) -> float:
    """Return the largest size in (0, most] with cost(size) <= target, up to `FIT` relatively.

    Args:
        cost: an increasing function of the size.
        target: largest cost that is allowed.
        most: largest size that is tried.
        start: first guess.

    Returns:
        A size that fits. A size larger by `FIT` did not fit, or is beyond `most`. 0.0 if no size
        >= `LEAST` fits.
    """
    size, ratio = min(most, max(start, LEAST)), 1 + 4 * FIT
    low, high, costs = 0.0, math.inf, {}
    while low == 0 or high == math.inf:  # outward in growing steps until both ends are known
        costs[size] = cost(size)
        if costs[size] <= target:
            low = size
            if low == most:
                return most
            size = min(low * ratio, most)
        else:
            high = size
            if high <= LEAST:
                return 0.0
            size = max(high / ratio, LEAST)
        ratio = min(ratio**3, 8.0)
    step = 0
    while high > low * (1 + FIT):
        width = math.log(high / low)
        # log cost is nearly linear in log size. Every third step halves the bracket instead.
        share, known = 0.5, 0 < costs[low] <= costs[high] < math.inf
        if step % 3 < 2 and known and costs[low] < costs[high]:
            share = math.log(target / costs[low]) / math.log(costs[high] / costs[low])
            # Step a little beyond the crossing, seen from the nearer end, so that both ends move.
            share += (-1 if share > 0.5 else 1) * 0.4 * FIT / width
            share = min(max(share, 0.25 * FIT / width), 1 - 0.25 * FIT / width)
        size = low * math.exp(share * width)
        costs[size] = cost(size)
        low, high = (size, high) if costs[size] <= target else (low, size)
        step += 1
    return low
