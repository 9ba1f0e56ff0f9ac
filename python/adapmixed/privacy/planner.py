"""Settings for a given (ε, δ), the inverse, and the plan that a public rule recommends.

The planner computes settings from public numbers. It looks at no private data, and private results
must not guide the choice among its plans: see docs/how-to/plan-a-budget.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import lru_cache, partial
from typing import Any

import numpy as np

from adapmixed.limits import (
    MOST_BOX,
    MOST_DEPTH,
    MOST_EXPONENT,
    MOST_MODELS,
    MOST_ORDER,
    MOST_QUERIES,
    check_box,
    check_clip,
    check_delta,
    check_epsilon,
    check_models,
    check_number,
    check_queries,
    check_question,
    check_scale,
)
from adapmixed.privacy.composition import (
    FEW,
    PLANNED_POINTS,
    bounded_range_epsilon,
    clipped_mixing_epsilon,
    renyi_epsilon,
)
from adapmixed.privacy.conversions import c_alpha, emptied_share, lowered, rdp_to_dp
from adapmixed.privacy.costs import (
    RANGE_ERROR,
    answer_range,
    clipped_mixing_pair,
    radius_for_epsilon,
    sound_bound,
)

__all__ = ["Plan", "epsilon_of", "models_for", "plan", "queries_for", "recommended"]

SHAPES = (4.0, 8.0, 16.0, 32.0, 64.0)
"""Shapes log C / |log c| of the boxes that are tried."""

SCALES = (1.0, 2.0, 3.0, 4.0)
"""Scales κ of the log pools that are listed."""

CHOSEN_SHAPE, CHOSEN_SCALE = 16.0, 2.0
"""Shape of the box and κ of the log pool that the rule takes, by their perplexity on one
text; see docs/how-to/plan-a-budget.md."""

SHARDS = (100, 300, 1_000)
"""Numbers of shards with which `kept_share` was measured."""

_BOXES: Mapping[int, Mapping[float, float]] = {  # of ClippedMixing
    100: {1.363: 0.053, 2.085: 0.121, 4.018: 0.215, 5.857: 0.263, 19.66: 0.395, 69.73: 0.498},
    300: {2.235: 0.109, 5.201: 0.219, 14.45: 0.342, 22.09: 0.388, 88.37: 0.518, 365.5: 0.613},
    1_000: {6.601: 0.183, 23.74: 0.311, 84.03: 0.43, 114.3: 0.457, 506.6: 0.562, 2_557.0: 0.632},
}
_CLIPS: Mapping[int, Mapping[float, float]] = {  # of ClippedLogPool, from 0 at scale 2
    100: {0.2275: 0.078, 0.8337: 0.244, 2.237: 0.443, 2.591: 0.465, 5.181: 0.441},
    300: {0.2545: 0.063, 0.6826: 0.158, 2.501: 0.412, 3.355: 0.463, 6.71: 0.449, 15.54: 0.406},
    1_000: {0.8482: 0.11, 2.275: 0.248, 4.168: 0.359, 8.337: 0.416, 22.37: 0.411},
}
"""Shares by N and `upper`, of benchmarks/results/headline.txt."""

_ORDERS = (-3.0, 9.0)  # log(order - 1): PMixED's orders from 1.05, at most `MOST_ORDER`
_SEARCH = 2**14  # grid points while searching
_LARGEST = 20.0  # |log| of a box's farther side, where the search ends
_WIDEST = 2 * _LARGEST  # the widest clip range of the log pool
_LEAST = 1e-9  # the smallest size that is tried
FIT = 5e-4
"""Relative width at which a search ends."""


@dataclass(frozen=True)
class Plan:
    """One mechanism with its settings and their cost.

    Attributes:
        mechanism: "clipped-mixing", "clipped-log-pool" or "pmixed".
        settings: values by name: lower and upper of ClippedMixing; scale, lower and upper of
            ClippedLogPool; or order, radius and target_leakage of PMixED.
        epsilon: ε of all `queries` at `delta`, rounded up, at most the target.
        delta: δ.
        num_models: N.
        queries: T, number of private answers that the plan is for.
        adjacency: "zero_out" or "replace_one".
    """

    mechanism: str
    settings: Mapping[str, float]
    epsilon: float
    delta: float
    num_models: int
    queries: int
    adjacency: str


def plan(
    epsilon: float,
    delta: float,
    num_models: int,
    queries: int,
    adjacency: str = "zero_out",
    *,
    shapes: Sequence[float] = SHAPES,
    scales: Sequence[float] = SCALES,
) -> list[Plan]:
    """Find the widest settings of every mechanism within (epsilon, delta), in a few seconds.

    They do not tell which plan gives the best answers: :func:`recommended` takes one by a rule.

    The ε of each plan follows from the mechanism's theorem: docs/theory/pmixed.md for PMixED,
    docs/theory/clipped-mixing.md for ClippedMixing and docs/theory/clipped-log-pool.md for
    ClippedLogPool. No ε of AdaPMixED can be planned (docs/theory/adapmixed.md).

    Args:
        epsilon: target ε > 0.
        delta: δ in [1e-15, 0.1].
        num_models: N ≥ 1.
        queries: T ≥ 1, number of private answers that the budget is for.
        adjacency: "zero_out" or "replace_one".
        shapes: log C / |log c| of ClippedMixing's boxes, each > 0.
        scales: κ of ClippedLogPool, each > 0.

    Returns:
        One plan for each shape and each scale, and one of PMixED if any order has a ball.

    Raises:
        ValueError: an argument is out of range.
    """
    target, delta, way = check_epsilon(epsilon), check_delta(delta), check_question(adjacency)
    models, queries = check_models(num_models), check_queries(queries)
    for name, values in (("shapes", shapes), ("scales", scales)):
        for value in values:
            check_number(name, value, above=0.0)
    common = (target, delta, models, queries, way)
    plans = [_clipped_mixing(*common, shape) for shape in shapes]
    plans += [_log_pool(*common, scale) for scale in scales]
    pmixed = _pmixed(*common)
    return plans if pmixed is None else [*plans, pmixed]


def chosen(
    epsilon: float, delta: float, num_models: int, queries: int, adjacency: str = "zero_out"
) -> list[Plan]:
    """Return the rule's box and log pool, unless only the public answer fits; as :func:`plan`."""
    rule = {"shapes": (CHOSEN_SHAPE,), "scales": (CHOSEN_SCALE,)}
    plans = plan(epsilon, delta, num_models, queries, adjacency, **rule)[:2]
    return [choice for choice in plans if choice.settings["lower"] < choice.settings["upper"]]


def _clipped_mixing(
    target: float, delta: float, models: int, queries: int, adjacency: str, shape: float
) -> Plan:
    longest = _LARGEST / max(1.0, shape)

    def box(size: float) -> tuple[float, float]:
        return math.exp(-size), math.exp(size * shape)

    def roughly(size: float) -> float:
        return renyi_epsilon(clipped_mixing_pair(*box(size), models, adjacency), queries, delta)

    def cost(size: float, points: int = PLANNED_POINTS) -> float:
        return clipped_mixing_epsilon(*box(size), models, queries, delta, adjacency, points=points)

    size = largest_within(roughly, target, longest)
    size = largest_within(lambda size: cost(size, _SEARCH), target, longest, start=size)
    size = largest_within(cost, target, longest, start=size)
    size = min(size, math.log(MOST_BOX) / (1 + shape) * (1 - 1e-12))
    settings = dict(zip(("lower", "upper"), box(size), strict=True))
    return Plan("clipped-mixing", settings, cost(size), delta, models, queries, adjacency)


def _log_pool(
    target: float, delta: float, models: int, queries: int, adjacency: str, scale: float
) -> Plan:
    def cost(width: float) -> float:
        return epsilon_of(delta, models, queries, adjacency, lower=0.0, upper=width, scale=scale)

    widest = min(_WIDEST, MOST_DEPTH / scale * (1 - 2.0**-50))
    span = _largest_range(target, delta, queries) / (2 if adjacency == "replace_one" else 1)
    width = min(span * models / scale * (1 - 2 * RANGE_ERROR), widest)
    width = lowered(width, 0.0, lambda width: cost(width) <= target)
    settings = {"scale": scale, "lower": 0.0, "upper": width}
    return Plan("clipped-log-pool", settings, cost(width), delta, models, queries, adjacency)


@lru_cache(maxsize=8)  # it is the same for every scale
def _largest_range(target: float, delta: float, queries: int) -> float:
    """Return the largest range η of one answer within (target, delta), up to `FIT`."""

    def cost(span: float, few: int = FEW) -> float:
        return bounded_range_epsilon(span, queries, delta, few=few)

    span = largest_within(partial(cost, few=0), target, _WIDEST)
    return largest_within(cost, target, _WIDEST, start=span)


def _pmixed(target: float, delta: float, models: int, queries: int, adjacency: str) -> Plan | None:
    """Return the plan of the order with the largest β = R/α; None if no order fits."""
    inner_delta, inner = delta, target
    if adjacency == "replace_one":  # two zero-outs: (2ε, (1 + e^ε) δ)
        inner = target / 2
        inner_delta = emptied_share(inner, delta)
    if inner_delta == 0:
        return None

    def ball(position: float) -> tuple[float, float, float]:
        """Return (β, order, R) near order 1 + e^position, with the order rounded as it is shown."""
        order = min(float(f"{1 + math.exp(position):.4g}"), MOST_ORDER)
        left = (inner - c_alpha(order, inner_delta)) / queries * (1 - 1e-12)
        radius = left
        if left > 0:
            radius = radius_for_epsilon(order, left, models)
            radius = min(radius, MOST_EXPONENT / (order - 1))
        return radius / order, order, radius

    low, high = _ORDERS
    for _ in range(3):  # a grid, then twice around its best point
        positions = [low + (high - low) * step / 96 for step in range(97)]
        best = max(positions, key=ball)
        reach = (high - low) / 48
        low, high = max(_ORDERS[0], best - reach), min(_ORDERS[1], best + reach)
    leakage, order, radius = ball(best)
    if leakage <= 0:
        return None
    spent = queries * sound_bound(order, radius, models) * (1 + 2.0**-50)
    cost = rdp_to_dp(order, spent, delta, adjacency)
    settings = {"order": order, "epsilon": target, "radius": radius, "target_leakage": leakage}
    return Plan("pmixed", settings, cost, delta, models, queries, adjacency)


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
        >= `_LEAST` fits.
    """
    size, ratio = min(most, max(start, _LEAST)), 1 + 4 * FIT
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
            if high <= _LEAST:
                return 0.0
            size = max(high / ratio, _LEAST)
        ratio = min(ratio**3, 8.0)
    step = 0
    while high > low * (1 + FIT):
        width = math.log(high / low)
        # log cost is nearly linear in log size. Every third step halves the bracket instead.
        share, usable = 0.5, 0 < costs[low] <= costs[high] < math.inf
        if step % 3 < 2 and usable and costs[low] < costs[high]:
            share = math.log(target / costs[low]) / math.log(costs[high] / costs[low])
            # Step a little beyond the crossing, seen from the nearer end, so that both ends move.
            share += (-1 if share > 0.5 else 1) * 0.4 * FIT / width
            share = min(max(share, 0.25 * FIT / width), 1 - 0.25 * FIT / width)
        size = low * math.exp(share * width)
        costs[size] = cost(size)
        low, high = (size, high) if costs[size] <= target else (low, size)
        step += 1
    return low


def epsilon_of(
    delta: float,
    num_models: int,
    queries: int,
    adjacency: str,
    *,
    lower: float,
    upper: float,
    scale: float | None = None,
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

    Returns:
        ε ≥ 0, rounded up; +inf allowed.

    Raises:
        ValueError: an argument is out of range.
    """
    delta, models = check_delta(delta), check_models(num_models)
    count, way = check_queries(queries, least=0), check_question(adjacency)
    if scale is None:
        box = check_box(lower, upper)
        return clipped_mixing_epsilon(*box, models, count, delta, way, points=PLANNED_POINTS)
    low, high = check_clip(lower, upper)
    span = answer_range(check_scale(scale, low, high), low, high, models, way)
    return bounded_range_epsilon(span, count, delta)


def queries_for(
    epsilon: float, delta: float, num_models: int, adjacency: str = "zero_out", **settings: Any
) -> int:
    """Return the largest number of queries within (epsilon, delta), at most 2^40.

    It is 0 if one query is too many, and one more does not keep ε. The target is ε > 0; the other
    arguments, the errors and the theorems are those of :func:`epsilon_of`.
    """
    target = check_epsilon(epsilon)

    def spent(queries: int) -> bool:
        return epsilon_of(delta, num_models, queries, adjacency, **settings) > target

    return bisect_left(range(1, MOST_QUERIES + 1), True, key=spent)


def models_for(
    epsilon: float, delta: float, queries: int, adjacency: str = "zero_out", **settings: Any
) -> int | None:
    """Return the smallest number of models, two or more, that keeps (epsilon, delta).

    None if it would be larger than 65 536. One model less does not keep ε, as the cost falls with
    N: "Wider boxes and smaller ensembles cost more" in docs/theory/clipped-mixing.md, and
    docs/theory/clipped-log-pool.md. Arguments and errors are those of :func:`epsilon_of`.
    """
    target = check_epsilon(epsilon)

    def kept(models: int) -> bool:
        return epsilon_of(delta, models, queries, adjacency, **settings) <= target

    least = 2 + bisect_left(range(2, MOST_MODELS + 1), True, key=kept)
    return least if least <= MOST_MODELS else None


def recommended(
    epsilon: float,
    delta: float,
    num_models: int,
    queries: int,
    adjacency: str = "zero_out",
    *,
    mechanism: str = "clipped-mixing",
) -> Plan:
    """Return the plan of the public rule, with settings that are rounded inward to four digits.

    The rule is the widest box of `CHOSEN_SHAPE`, or the widest clip from 0 at `CHOSEN_SCALE`. It
    looks at no member and at no text.

    The first arguments are those of `plan`.

    Args:
        mechanism: "clipped-mixing" or "clipped-log-pool".

    Raises:
        ValueError: an argument is out of range, or only the public answer fits.
    """
    for choice in chosen(epsilon, delta, num_models, queries, adjacency):
        if choice.mechanism == mechanism:
            settings: dict[str, Any] = rounded_inward(choice.settings)
            cost = epsilon_of(delta, num_models, queries, adjacency, **settings)
            return replace(choice, settings=settings, epsilon=cost)
    raise ValueError(
        f"epsilon must pay for {queries} answers of {mechanism}, got {epsilon!r}: give a larger "
        "one, fewer answers or more shards"
    )


def rounded_inward(settings: Mapping[str, float]) -> dict[str, float]:
    """Return bounds with four digits, near 1 of their distance from 1, which cost no more."""
    rounded = {}
    for name, value in settings.items():
        context = Context(prec=4, rounding=ROUND_CEILING if name == "lower" else ROUND_FLOOR)
        near = Decimal(1 if 0 < abs(value - 1.0) < 0.01 else 0)
        rounded[name] = float(near + context.create_decimal(Decimal(value) - near))
    return rounded


def nearest(num_models: int) -> int:
    """Return the number of shards in `SHARDS` that is nearest to N, as a ratio."""
    return min(SHARDS, key=lambda shards: abs(math.log(shards / num_models)))


def kept_share(choice: Plan) -> float:
    """Return the share of the best gain without protection that settings of the rule kept.

    It was measured on one text with one model and `nearest` shards, and is interpolated over the
    size of box or clip, which decides the perplexity whatever ε and the number of queries are.

    Args:
        choice: a plan of `recommended` or `chosen`.
    """
    boxed = choice.mechanism == "clipped-mixing"
    shares = (_BOXES if boxed else _CLIPS)[nearest(choice.num_models)]
    sizes = np.log(np.array([choice.settings["upper"], float(boxed), *shares]) + (not boxed))
    return float(np.interp(sizes[0], sizes[1:], [0.0, *shares.values()]))
