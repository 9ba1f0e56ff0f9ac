"""ε of given settings, and what the settings allow: how many queries, how many models."""

from __future__ import annotations

import math
from functools import partial

from adapmixed.checks import check_delta, check_epsilon
from adapmixed.privacy.composition import clipped_mixing_epsilon
from adapmixed.privacy.conversions import zcdp_to_dp
from adapmixed.privacy.costs.clipped_log_pool import bounded_range_rho

FINE = 2**18
"""Grid points of a planned ε."""


def epsilon_of(
    delta: float,
    num_models: int,
    queries: int,
    adjacency: str,
    *,
    lower: float,
    upper: float,
    scale: float | None = None,
    points: int = FINE,
) -> float:
    """ε of `queries` answers: of ClippedMixing (ratios), or with `scale` of ClippedLogPool (logs).

    The theorems: docs/privacy.md, sections 11 and 12. Valid with any number of grid
    `points`; an `Accountant` uses more of them.
    """
    if scale is None:
        return clipped_mixing_epsilon(
            lower, upper, num_models, queries, delta, adjacency, points=points
        )
    rho = bounded_range_rho(scale, lower, upper, num_models, adjacency)
    return zcdp_to_dp(math.nextafter(queries * rho, math.inf) if rho else 0.0, delta)[0]


def queries_for(
    epsilon: float,
    delta: float,
    num_models: int,
    adjacency: str = "zero_out",
    *,
    lower: float,
    upper: float,
    scale: float | None = None,
    most: int = 10**9,
) -> int:
    """The largest number of queries within (epsilon, delta), at most `most`; 0 if one is too many.

    Found by bisection: the answer keeps epsilon by `epsilon_of`, one query more does not. Settings
    as for `epsilon_of`, whose theorems (docs/privacy.md, sections 11 and 12) it inverts.
    """
    target, delta = check_epsilon(epsilon), check_delta(delta)
    cost = partial(epsilon_of, scale=scale)

    def fits(queries: int) -> bool:
        setting = (delta, num_models, queries, adjacency)
        return cost(*setting, lower=lower, upper=upper) <= target

    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, min(8 * high, most)
    if high == most and fits(most):
        return most
    while high - low > 1:
        middle = _between(low, high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def models_for(
    epsilon: float,
    delta: float,
    queries: int,
    adjacency: str = "zero_out",
    *,
    lower: float,
    upper: float,
    scale: float | None = None,
    most: int = 10**7,
) -> int | None:
    """The smallest ensemble, of two models or more, that keeps (epsilon, delta); None above `most`.

    Found by bisection: the answer keeps epsilon by `epsilon_of`, one model less does not. Settings
    as for `epsilon_of`, whose theorems it inverts; the cost falls with N (docs/privacy.md,
    section 11, "Wider boxes and smaller ensembles", and section 12).
    """
    target, delta = check_epsilon(epsilon), check_delta(delta)
    cost = partial(epsilon_of, scale=scale)

    def fits(models: int) -> bool:
        setting = (delta, models, queries, adjacency)
        return cost(*setting, lower=lower, upper=upper) <= target

    low, high = 1, 2
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(4 * high, most)
    while high - low > 1:
        middle = _between(low, high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _between(low: int, high: int) -> int:
    """An integer strictly between, near the geometric mean."""
    return min(max(math.isqrt(max(low, 1) * high), low + 1), high - 1)
