"""The plan that a public rule recommends, and what its settings kept of a measured gain."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR
from typing import Any

import numpy as np

from adapmixed.limits import check_count, check_queries
from adapmixed.privacy.planner import Plan, chosen, epsilon_of
from adapmixed.privacy.rounding import four_digits

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


def recommended(
    epsilon: float,
    delta: float,
    num_models: int,
    queries: int,
    adjacency: str = "zero_out",
    *,
    mechanism: str = "clipped-mixing",
    periods: int = 1,
) -> Plan:
    """Return the plan of the public rule, with settings that are rounded inward to four digits.

    The rule is the widest box of `CHOSEN_SHAPE`, or the widest clip from 0 at `CHOSEN_SCALE`. It
    looks at no member and at no text.

    The first arguments are those of `plan`, with ε of all periods together and T of one.

    Args:
        mechanism: "clipped-mixing" or "clipped-log-pool".
        periods: number of periods with these settings and N, each with an ensemble and a ledger of
            its own. Neighbours differ in the same shard of every period.

    Returns:
        The plan of one period. Its `over_time` ends with all periods together, whose answers
        compose as those of one plan: the cost of an answer holds for any members.

    Raises:
        ValueError: an argument is out of range, or only the public answer fits.
    """
    whole = check_queries(queries) * check_count("periods", periods)
    plans = chosen(epsilon, delta, num_models, whole, adjacency)
    for one in (one for one in plans if one.mechanism == mechanism):
        settings: dict[str, Any] = rounded_inward(one.settings)
        first, last = (
            epsilon_of(delta, num_models, count, adjacency, **settings)
            for count in (queries, whole)
        )
        over_time = ((queries, first), (whole, last))
        return replace(one, settings=settings, epsilon=first, queries=queries, over_time=over_time)
    raise ValueError(
        f"epsilon must pay for {whole} answers of {mechanism}, got {epsilon!r}: give a larger one, "
        "fewer answers or more shards"
    )


def rounded_inward(settings: Mapping[str, float]) -> dict[str, float]:
    """Return bounds with four digits, near 1 of their distance from 1, which cost no more."""
    up = {"lower": ROUND_CEILING}
    return {k: float(four_digits(v, up.get(k, ROUND_FLOOR))) for k, v in settings.items()}


def nearest(num_models: int) -> int:
    """Return the number of shards in `SHARDS` that is nearest to N, as a ratio."""
    return min(SHARDS, key=lambda shards: abs(math.log(shards / num_models)))


def kept_share(one: Plan) -> float:
    """Return the share of the best gain without protection that settings of the rule kept.

    It was measured on one text with one model and `nearest` shards, and is interpolated over the
    size of box or clip, which decides the perplexity whatever ε and the number of queries are.

    Args:
        one: a plan of `recommended` or `planner.chosen`.
    """
    boxed = one.mechanism == "clipped-mixing"
    found = (_BOXES if boxed else _CLIPS)[nearest(one.num_models)]
    sizes = np.log(np.array([one.settings["upper"], float(boxed), *found]) + (not boxed))
    return float(np.interp(sizes[0], sizes[1:], [0.0, *found.values()]))
