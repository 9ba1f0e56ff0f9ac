"""ε of many answers from a pair of distributions or a range that bounds each, rounded up.

**A dominating pair** (ClippedMixing). The losses log(p/q) of the pair are put on a grid. Each atom
is split between its two neighbours on the grid, so that its P-mass and its Q-mass stay. To merge
the parts again is post-processing, so the pair on the grid dominates. dp-accounting rounds every
loss up by default. That would add up to `queries` times the interval to ε.

dp-accounting composes the privacy loss distributions. ε is read off here, at exact losses, because
dp-accounting steps through them by subtraction, which drifts. The Rényi bound and the pure bound in
closed form cap the result. They replace it if the noise of the FFT is not small against δ.

**A bounded range** (ClippedLogPool). One answer has range η if log(p/p') lies in an interval of
length η for the distributions p and p' of neighbours. docs/theory/bounded-range.md proves the two
bounds of which the smaller one is taken: a Gaussian one for any number of answers, and the exact
optimum of all adaptive adversaries for few of them.

**A budget of every shard** (`ShardBudget`) needs no number of answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.conversions import gdp_to_dp, least, rdp_to_dp, times_up, up, zcdp_to_dp
from adapmixed.privacy.costs import DominatingPair, accounted_box, answer_error, clipped_mixing_pair

POINTS = 2**20
"""Grid points across the composed loss, which take a second or two. ε is then above the limit of
ever finer grids by less than 1e-5, relatively, up to 99 840 queries at N = 100 and δ = 1e-5. With
2^18 points it is less than 6e-5."""

PLANNED_POINTS = 2**18
"""Grid points of a planned ε. No larger number of points gives a larger ε than this one."""

_DEVIATIONS = 20.0  # standard deviations on the grid, beyond which tails are far below any δ in use
_MASS_ERROR = 2.0**-49  # relative error of a pair's masses, from a few roundings
_FFT_ERROR = 2.0**-50  # error of the sum of the composed masses, per query
_ORDERS = [1 + 2.0 ** (k / 4) for k in range(-40, 81)]
_INDEX_BITS, _DIGITS = 27, 26  # the product of an index and an interval of these bits is exact
_ROUNDING = 2.0**-46
"""Rounding of the sum in δ(ε), relative to the sum of its terms' magnitudes. Below 2^24 terms,
pairwise summation errs by less than 45 · 2^-53 of that sum, and each term by less than 16 · 2^-53
of itself."""

FEW = 512
"""Largest number of answers for which the optimum is computed, in less than half a second."""

_SPANS = (1e-12, 50.0)  # ranges for which rounding stays far below the errors of the grid
_LARGEST = 600.0  # largest log m on the grid, so that m stays finite in float64
_STEP_ERROR = 2.0**-44  # relative error of one step of the programme, from some tens of roundings


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

    The theorems of the dominating pair and of its composition are in docs/theory/clipped-mixing.md.

    Args:
        lower: c of the nominal box. The accounted box is wider by `BOX_ERROR`, and `answer_error`
            is added.
        upper: C of the nominal box.
        num_models: N ≥ 1.
        queries: T ≥ 0, number of answers.
        delta: δ in (0, 1).
        adjacency: "zero_out" or "replace_one".
        points: number of grid points, ≥ 16. ε is valid with any number of them, and fewer are
            faster. If one number is the other times a power of two, the grids are nested, and the
            coarser grid has no smaller ε but for rounding. Other numbers have no such order.

    Returns:
        ε ≥ 0, rounded up; +inf allowed.
    """
    if lower == 1 or upper == 1:  # every answer is q
        return 0.0
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
    """Return ε at `delta` of `queries` answers that `pair` dominates, the larger of both orders.

    docs/theory/clipped-mixing.md has the theorem on composition, and "How ε is computed" there
    explains the grid. Other arguments and the result are those of :func:`clipped_mixing_epsilon`.

    Args:
        pair: dominating pair of one answer. It and T are fixed in advance; inputs may be adaptive.
        error: η ≥ 0. The probability of each outcome is within e^±η of what `pair` dominates.
    """
    loss = pair.largest_loss()
    # The loss of very many models rounds to 0, and their error remains.
    if queries == 0 or (loss == 0 and error == 0):
        return 0.0
    # A relative error η per query turns (ε, δ e^{-Tη}) into (ε + 2Tη, δ): docs/theory/numerics.md.
    slack = queries * (_MASS_ERROR + error) * (1 + 2.0**-50)
    share = delta * math.exp(-slack) * (1 - 2.0**-50)
    bound = min(queries * loss, renyi_epsilon(pair, queries, share))
    room = share - queries * _FFT_ERROR
    if room > share / 2:
        # dp-accounting fails if losses leave the range of doubles or if it cuts off all masses.
        # The bound in closed form holds there, too.
        failures = (ArithmeticError, IndexError, ValueError)
        # With a tiny δ the FFT's noise can make a fine grid's ε the larger one.
        for number in {points, min(points, PLANNED_POINTS)}:
            with suppress(*failures), np.errstate(all="raise", under="ignore"):
                bound = min(bound, _by_loss_distribution(pair, queries, room, number))
    return math.nextafter((bound + 2 * slack) * (1 + 2.0**-40), math.inf)


def renyi_epsilon(pair: DominatingPair, queries: int, delta: float) -> float:
    """Return a faster and larger ε than `composed_epsilon` does, from Rényi costs.

    The order may be chosen because the pair and the number of queries are fixed in advance; see
    docs/theory/adapmixed.md and docs/theory/clipped-mixing.md.
    """
    best, other = math.inf, pair.exchanged()
    for order in _ORDERS:
        single = max(pair.renyi(order), other.renyi(order))
        best = min(best, rdp_to_dp(order, queries * single * (1 + 1e-9), delta))
    return best


def _by_loss_distribution(pair: DominatingPair, queries: int, delta: float, points: int) -> float:
    from dp_accounting.pld import privacy_loss_distribution

    interval = _interval(pair, queries, points)
    both = pair, pair.exchanged()
    infinite = [math.fsum(a for a, b in side.atoms if b == 0) for side in both]
    beyond = -math.expm1(queries * math.log1p(-max(infinite))) if max(infinite) < 1 else 1.0
    if beyond > delta:  # an infinite loss among all answers is more probable than δ
        return math.inf
    if interval == 0:  # every finite loss is 0
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
    epsilon = 0.0
    for dense in (pmf.to_dense_pmf() for pmf in (total._pmf_remove, total._pmf_add)):
        masses, first = np.asarray(dense._probs, dtype=np.float64), int(dense._lower_loss)
        mass = float(dense._infinity_mass)
        epsilon = max(epsilon, smallest_epsilon(masses, first, interval, mass, delta))
    return epsilon


def _interval(pair: DominatingPair, queries: int, points: int) -> float:
    """Return the distance of grid points at which `points` of them span the composed loss."""
    largest, reach = 0.0, 0.0
    for side in (pair, pair.exchanged()):
        finite = [(a, math.log(a / b)) for a, b in side.atoms if a > 0 and b > 0]
        mean = math.fsum(a * loss for a, loss in finite)
        largest = max(largest, math.fsum(a * (loss - mean) ** 2 for a, loss in finite))
        reach = max([reach, *(abs(loss) for _, loss in finite)])
    spread = _DEVIATIONS * math.sqrt(queries * largest)
    return short_interval(max(spread, 2 * reach) / points)


def _split(pair: DominatingPair, interval: float) -> tuple[dict[int, float], dict[int, float]]:
    """Return the masses of both orders on the grid {k interval}: {k: P-mass}, {-k: Q-mass}.

    Let an atom of loss l lie between the grid points a and b = a + h. The share
    s = (1 - e^{a-l})/(1 - e^{-h}) of its P-mass goes to b, as does s e^{l-b} of its Q-mass. The
    rest goes to a: r = (1 - e^{l-b})/(1 - e^{-h}) of its Q-mass and r e^{a-l} of its P-mass, which
    are not formed as differences, as s may be near 1. Then P = Q e^loss holds on both parts.
    """
    forward: dict[int, float] = defaultdict(float)
    backward: dict[int, float] = defaultdict(float)
    for a, b in pair.atoms:
        if a == 0 or b == 0:
            continue
        loss = math.log(a / b)
        index = math.floor(loss / interval)
        offset = min(max(loss - index * interval, 0.0), interval)
        upper = math.expm1(-offset) / math.expm1(-interval)
        lower = math.expm1(offset - interval) / math.expm1(-interval)
        parts = (
            (index, a * lower * math.exp(-offset), b * lower),
            (index + 1, a * upper, b * upper * math.exp(offset - interval)),
        )
        for place, p, q in parts:
            if p > 0 or q > 0:
                forward[place] += p
                backward[-place] += q
    return dict(forward), dict(backward)


def _power(single: Any, times: int, tail: float) -> Any:
    """Return `single` composed `times` times with itself, in two stages if these are many.

    dp-accounting bounds the range of a composition by moments. Their orders suit lists that are
    not much shorter than the range, so one stage would take many times the points.
    """
    if times <= 1024:
        return single.self_compose(times, tail)
    stage = math.isqrt(times)
    total = _power(single, stage, tail).self_compose(times // stage, tail)
    rest = times % stage
    return total.compose(_power(single, rest, tail), tail) if rest else total


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
    """
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
        bound = (infinite + float(terms.sum()) + rounding) * (1 + 2.0**-50)
        return bound, float((np.exp(above) * mass).sum())

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
    zcdp, largest = zcdp_to_dp(rho, delta), min(largest, rho)
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
    deltas = (value / point)[: len(point) // 2 + 1][::-1] * (1 + 2.0**-40)
    if deltas[0] <= delta:
        return 0.0
    enough = deltas <= delta
    if not enough.any():
        return math.inf
    at = int(enough.argmax())
    ratio = 1 / point[len(point) // 2 - at + 1], 1 / point[len(point) // 2 - at]
    share = (deltas[at - 1] - delta) / (deltas[at - 1] - deltas[at])
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


@dataclass(frozen=True)
class ShardBudget:
    """The largest sum of each member's own charges, fixed before the first query.

    The individual Rényi filter (Feldman and Zrnic 2021) turns it into (ε, δ); see
    docs/theory/per-shard-budgets.md.

    Attributes:
        amount: B ≥ 0.
        order: Rényi order > 1 if charges are D↔_order, None if they are ρ.
        largest: largest charge ρ = η²/8 of one answer, if all charges are of answers of a bounded
            range; ε is then smaller. None if that is not known.
    """

    amount: float
    order: float | None = None
    largest: float | None = None

    @classmethod
    @lru_cache(maxsize=256)
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        order: float | None,
        adjacency: str = "zero_out",
        largest: float | None = None,
    ) -> ShardBudget:
        """Return the largest budget whose ε for these neighbours is at most `epsilon`.

        It inverts the theorem of docs/theory/per-shard-budgets.md.

        Args:
            epsilon: ε > 0.
            delta: δ in (0, 1).
            order: Rényi order of the charges; None for zCDP.
            adjacency: "zero_out" or "replace_one".
            largest: as in :class:`ShardBudget`.

        Raises:
            ValueError: the conversion to (ε, δ) at this order and delta costs more than epsilon.
        """

        def stated(amount: float) -> float:
            return cls(amount, order, largest).epsilon(delta, adjacency)

        if order is not None and stated(0.0) > epsilon:
            raise ValueError(
                f"epsilon must be > {stated(0.0)!r}, the cost of the conversion at order {order!r} "
                f"and delta {delta!r}, got {epsilon!r}: a larger order costs less"
            )
        high = 1.0
        while stated(high) <= epsilon:
            high *= 2
        above = least(lambda amount: stated(amount) > epsilon, high)
        return cls(math.nextafter(above, 0.0), order, largest)

    def epsilon(self, delta: float, adjacency: str = "zero_out") -> float:
        """Return ε at δ for any number of tokens, rounded up.

        The theorem is in docs/theory/per-shard-budgets.md. For replace-one, the statement passes
        through the emptied shard. Twice the Rényi budget is no bound there, so the result is
        2 ε(δ₁) with δ₁ = δ/(1 + e^ε(δ₁)). Charges ρ become four times as large.

        Args:
            delta: δ in (0, 1).
            adjacency: "zero_out" or "replace_one".
        """
        order, amount = self.order, self.amount
        if order is None:
            factor = 4 if adjacency == "replace_one" else 1
            if self.largest is not None:
                largest = times_up(factor, self.largest)
                return adaptive_epsilon(times_up(factor, amount), largest, delta)
            return zcdp_to_dp(times_up(factor, amount), delta)
        return rdp_to_dp(order, amount, delta, adjacency)
