"""ε of given settings, and the number of queries or models that the settings allow."""

from __future__ import annotations

import math
from collections.abc import Callable

from adapmixed.limits import (
    MOST_MODELS,
    MOST_QUERIES,
    check_box,
    check_clip,
    check_count,
    check_delta,
    check_epsilon,
    check_models,
    check_queries,
    check_question,
    check_scale,
)
from adapmixed.privacy.bounded_range import bounded_range_epsilon
from adapmixed.privacy.composition import PLANNED_POINTS, clipped_mixing_epsilon
from adapmixed.privacy.costs.clipped_log_pool import answer_range


def epsilon_of(
    delta: float,
    num_models: int,
    queries: int,
    adjacency: str,
    *,
    lower: float,
    upper: float,
    scale: float | None = None,
    points: int = PLANNED_POINTS,
) -> float:
    """Return ε of `queries` answers of ClippedMixing, or of ClippedLogPool if `scale` is given.

    The theorems are in docs/theory/clipped-mixing.md and docs/theory/clipped-log-pool.md.

    Args:
        delta: δ in [1e-15, 0.1].
        num_models: N ≥ 1.
        queries: T ≥ 0, number of answers.
        adjacency: "zero_out" or "replace_one".
        lower: c of the box in [0, 1] (a ratio), or a ≤ 0 of the log pool (in log units).
        upper: C ≥ 1 of the box, or b ≥ 0 of the log pool.
        scale: κ ≥ 0 of ClippedLogPool; None for ClippedMixing.
        points: number of grid points for ClippedMixing. ε is valid with any number of them; an
            `Accountant` uses more.

    Returns:
        ε ≥ 0, rounded up; +inf allowed.

    Raises:
        ValueError: an argument is out of range.
    """
    delta, models, queries = (
        check_delta(delta),
        check_models(num_models),
        check_queries(queries, least=0),
    )
    check_question(adjacency)
    if scale is None:
        points, box = check_count("points", points, 16), check_box(lower, upper)
        return clipped_mixing_epsilon(*box, models, queries, delta, adjacency, points=points)
    low, high = check_clip(lower, upper)
    span = answer_range(check_scale(scale, low, high), low, high, models, adjacency)
    return bounded_range_epsilon(span, queries, delta)


def queries_for(
    epsilon: float,
    delta: float,
    num_models: int,
    adjacency: str = "zero_out",
    *,
    lower: float,
    upper: float,
    scale: float | None = None,
) -> int:
    """Return the largest number of queries within (epsilon, delta).

    It inverts :func:`epsilon_of` by bisection, whose arguments and errors it has; the target is
    ε > 0. The theorems are in docs/theory/clipped-mixing.md and docs/theory/clipped-log-pool.md.

    Returns:
        The number of queries, at most 2^40; 0 if one query is too many. One more does not keep ε.
    """
    target = check_epsilon(epsilon)

    def exceeds(queries: int) -> bool:
        setting = (delta, num_models, queries, adjacency)
        return epsilon_of(*setting, lower=lower, upper=upper, scale=scale) > target

    found = _smallest(exceeds, 0, MOST_QUERIES)
    return MOST_QUERIES if found is None else found - 1


def models_for(
    epsilon: float,
    delta: float,
    queries: int,
    adjacency: str = "zero_out",
    *,
    lower: float,
    upper: float,
    scale: float | None = None,
) -> int | None:
    """Return the smallest number of models, two or more, that keeps (epsilon, delta).

    It inverts :func:`epsilon_of` by bisection, whose arguments and errors it has; the target is
    ε > 0. The cost falls with N: "Wider boxes and smaller ensembles cost more" in
    docs/theory/clipped-mixing.md, and docs/theory/clipped-log-pool.md.

    Returns:
        N, or None if it would be larger than 65 536. One model less does not keep ε.
    """
    target = check_epsilon(epsilon)

    def fits(models: int) -> bool:
        setting = (delta, models, queries, adjacency)
        return epsilon_of(*setting, lower=lower, upper=upper, scale=scale) <= target

    return _smallest(fits, 1, MOST_MODELS)


def _smallest(holds: Callable[[int], bool], low: int, most: int) -> int | None:
    """Return the smallest integer in (low, most] for which a condition holds; None without one.

    It holds for all larger integers, too. The search steps outward by factors, then bisects at
    geometric means.
    """
    high = low + 1
    while not holds(high):
        if high == most:
            return None
        low, high = high, min(8 * high, most)
    while high - low > 1:
        middle = min(max(math.isqrt(max(low, 1) * high), low + 1), high - 1)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
