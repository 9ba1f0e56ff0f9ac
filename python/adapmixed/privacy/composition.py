"""ε of many answers that are dominated by one pair, by privacy loss distributions; rounded up.

The losses log(p/q) of the pair are put on a grid by splitting each atom between its two neighbours
such that both its P-mass and its Q-mass stay: merging the parts again is post-processing, so the
pair on the grid dominates. (Rounding every loss up, the default of dp-accounting, would add up to
`queries` times the interval to ε.) dp-accounting composes; ε is read off here, at losses that are
exact (dp-accounting steps down through them by subtraction, which drifts). Valid bounds in closed
form, Rényi and pure, cap the result and replace it where FFT noise is not small against δ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from adapmixed.checks import check_count, check_delta, check_real
from adapmixed.privacy.conversions import rdp_to_dp
from adapmixed.privacy.costs.clipped_mixing import (
    DominatingPair,
    accounted_box,
    answer_error,
    clipped_mixing_pair,
)
from adapmixed.privacy.loss_tail import short_interval, smallest_epsilon

POINTS = 2**20
"""Grid points across the composed loss: a second or two. ε is then above the limit of ever finer
grids by less than 1e-5, relatively, up to 99 840 queries at N = 100, δ = 1e-5 (2^18: 6e-5)."""

_DEVIATIONS = 20.0  # of the composed loss that the grid spans: tails far below any δ in use
_LAW_ERROR = 2.0**-49  # relative, of a pair's masses: they come from a few roundings
_FFT_ERROR = 2.0**-50  # of the composed masses, in sum, per query
_ORDERS = [1 + 2.0 ** (k / 4) for k in range(-40, 81)]


@lru_cache(maxsize=1024)
def clipped_mixing_epsilon(
    lower: float,
    upper: float,
    num_models: int,
    queries: int,
    delta: float,
    adjacency: str,
    *,
    points: int = POINTS,
) -> float:
    """Return ε of `queries` answers of ClippedMixing at `delta`, in both orders of the neighbours.

    The theorem of the dominating pair and the one on composition: docs/privacy.md, section 11.

    Args:
        lower, upper: the nominal box; accounted is one wider by `BOX_ERROR`, and `answer_error`.
        adjacency: "zero_out" or "replace_one".
        points: of the grid; ε is valid with any number of them. Fewer are faster, and where one
            number is the other times a power of two, so that the grids are nested, ε is not smaller
            (but for rounding); of other numbers neither has the larger ε for certain.
    """
    low, high = accounted_box(lower, upper)
    pair = clipped_mixing_pair(low, high, num_models, adjacency)
    error = answer_error(lower, upper, num_models)
    return composed_epsilon(pair, queries, delta, error=error, points=points)


def composed_epsilon(
    pair: DominatingPair,
    queries: int,
    delta: float,
    *,
    error: float = 0.0,
    points: int = POINTS,
) -> float:
    """Return ε at `delta` of `queries` mechanisms dominated by `pair`: the larger of both orders.

    Composition and the grid on which it is computed: docs/privacy.md, section 11.

    Args:
        pair: fixed beforehand, as `queries` is; inputs may be adaptive.
        error: η >= 0: answers are within e^±η per outcome of what `pair` dominates.
        points: >= 16, of the grid.
    """
    queries, points = check_count("queries", queries, 0), check_count("points", points, 16)
    delta, loss = check_delta(delta), pair.largest_loss()
    if queries == 0 or loss == 0:
        return 0.0
    # Laws within a relative η per query: ε + 2Tη, δ e^{-Tη} (docs/privacy.md, section 8).
    slack = queries * (_LAW_ERROR + check_real("error", error)) * (1 + 2.0**-50)
    share = delta * math.exp(-slack) * (1 - 2.0**-50)
    bound = min(queries * loss, renyi_epsilon(pair, queries, share))
    room = share - queries * _FFT_ERROR
    if room > share / 2:
        # dp-accounting has no distribution of losses beyond the range of double, or whose masses
        # it cuts off altogether; the bound holds there, too.
        failures = (ArithmeticError, IndexError, ValueError)
        with suppress(*failures), np.errstate(all="raise", under="ignore"):
            bound = min(bound, _by_loss_distribution(pair, queries, room, points))
    return math.nextafter((bound + 2 * slack) * (1 + 2.0**-40), math.inf)


def renyi_epsilon(pair: DominatingPair, queries: int, delta: float) -> float:
    """Return a larger ε than `composed_epsilon`'s by Rényi costs, in a millisecond.

    The order may be chosen since pair and queries are fixed beforehand (docs/privacy.md, sections 5
    and 11). Arguments as there.
    """
    best, other = math.inf, pair.exchanged()
    for order in _ORDERS:
        single = max(pair.renyi(order), other.renyi(order))
        best = min(best, rdp_to_dp(order, queries * single * (1 + 1e-9), delta))
    return best


def _by_loss_distribution(pair: DominatingPair, queries: int, delta: float, points: int) -> float:
    from dp_accounting.pld import privacy_loss_distribution

    losses = [math.log(a / b) for a, b in zip(pair.p, pair.q, strict=True) if a > 0 and b > 0]
    interval = _interval(pair, queries, points)
    infinite = [math.fsum(a for a, b in atoms if b == 0) for atoms in _both_orders(pair)]
    beyond = -math.expm1(queries * math.log1p(-max(infinite))) if max(infinite) < 1 else 1.0
    if beyond > delta:  # one infinite loss among all answers is likelier than that
        return math.inf
    if interval == 0 or not losses:  # every finite loss is 0
        return 0.0
    forward, backward = _split(pair, interval)
    single = privacy_loss_distribution.PrivacyLossDistribution.create_from_rounded_probability(
        forward,
        infinite[0],
        interval,
        pessimistic_estimate=True,
        rounded_probability_mass_function_add=backward,
        infinity_mass_add=infinite[1],
        symmetric=False,
    )
    total = _power(single, queries, delta * 1e-10)
    return max(_read_off(pmf, interval, delta) for pmf in (total._pmf_remove, total._pmf_add))


def _read_off(pmf: Any, interval: float, delta: float) -> float:
    dense = pmf.to_dense_pmf()
    masses = np.asarray(dense._probs, dtype=np.float64)
    infinite, first = float(dense._infinity_mass), int(dense._lower_loss)
    return smallest_epsilon(masses, first, interval, infinite, delta)


def _both_orders(pair: DominatingPair) -> tuple[list[tuple[float, float]], ...]:
    return tuple(list(zip(one.p, one.q, strict=True)) for one in (pair, pair.exchanged()))


def _interval(pair: DominatingPair, queries: int, points: int) -> float:
    """Distance of the grid's points, such that `points` span the composed loss."""
    largest, reach = 0.0, 0.0
    for atoms in _both_orders(pair):
        finite = [(a, math.log(a / b)) for a, b in atoms if a > 0 and b > 0]
        mean = math.fsum(a * loss for a, loss in finite)
        largest = max(largest, math.fsum(a * (loss - mean) ** 2 for a, loss in finite))
        reach = max([reach, *(abs(loss) for _, loss in finite)])
    spread = _DEVIATIONS * math.sqrt(queries * largest)
    return short_interval(max(spread, 2 * reach) / points)


def _split(pair: DominatingPair, interval: float) -> tuple[dict[int, float], dict[int, float]]:
    """Both orders' masses on the grid {k interval}: {k: P-mass}, {-k: Q-mass}.

    An atom of loss l between a and b = a + h gives b the share (1 - e^{a-l})/(1 - e^{-h}) of its
    P-mass and that times e^{l-b} of its Q-mass, and a the rest: P = Q e^loss on every part.
    """
    forward: dict[int, float] = defaultdict(float)
    backward: dict[int, float] = defaultdict(float)
    for a, b in zip(pair.p, pair.q, strict=True):
        if a == 0 or b == 0:
            continue
        loss = math.log(a / b)
        index = math.floor(loss / interval)
        offset = min(max(loss - index * interval, 0.0), interval)
        upper = math.expm1(-offset) / math.expm1(-interval)
        for step, share in ((0, 1 - upper), (1, upper)):
            if share > 0:
                forward[index + step] += a * share
                backward[-index - step] += b * share * math.exp(offset - step * interval)
    return dict(forward), dict(backward)


def _power(single: Any, times: int, tail: float) -> Any:
    """`single` composed with itself, in two stages where there are many.

    dp-accounting bounds the range of a composition by moments whose orders suit lists that are not
    much shorter than the range; in one stage it would take many times the points.
    """
    if times <= 1024:
        return single.self_compose(times, tail)
    stage = math.isqrt(times)
    total = _power(single, stage, tail).self_compose(times // stage, tail)
    rest = times % stage
    return total.compose(_power(single, rest, tail), tail) if rest else total
