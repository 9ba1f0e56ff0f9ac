"""Rounding in the safe direction, and (ε, δ) of Rényi and Gaussian privacy in closed form.

Costs are rounded up, admissible settings down. After each step that may round, a result moves
outward by 4 ulp (`up`). A sum moves by 2^-50 times the sum of the magnitudes of its terms
(`sum_up`). Both exceed the error of IEEE arithmetic together with a C library whose exp, expm1, log
and log1p are within 2 ulp. Sums and multiples of costs that are already rounded up need only one
step to the next float (`add_up`, `times_up`). Arguments of exact value 0 cost exactly 0. Overflow
gives +inf, which is the safe direction, and never raises OverflowError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

_SUM_SLACK = 2.0**-50
_LARGEST = 700.0  # e^ε stays finite in float64 up to here; beyond it nothing is stated
_LEAST = 1e-290
_ERROR = 2.0**-50  # relative error of erfc and of one product, in a unit of 1 + argument^2


def up(value: float) -> float:
    """Return `value`, moved up by 4 ulp."""
    return value + 4 * math.ulp(value)


def sum_up(*terms: float) -> float:
    """Return the sum of terms with errors of a few ulp, moved up by 2^-50 of their magnitudes."""
    return math.fsum(terms) + _SUM_SLACK * math.fsum(map(abs, terms))


def softplus_up(value: float) -> float:
    """Return log(1 + e^value), rounded up."""
    if value <= 0:
        return up(math.log1p(up(math.exp(value))))
    return up(value + up(math.log1p(up(math.exp(-value)))))


def log_expm1_up(value: float) -> float:
    """Return log(e^value - 1) for value > 0, rounded up."""
    if value < 1:
        return sum_up(math.log(up(math.expm1(value))), _SUM_SLACK)
    return value if math.isinf(value) else up(value + math.log1p(-math.exp(-value)))


def lowered(guess: float, floor: float, admissible: Callable[[float], bool]) -> float:
    """Return the first admissible value of guess, guess (1 - 2^-52), guess (1 - 2^-51), ...

    The result is never below `floor`, which is admissible.
    """
    step = 2.0**-53
    value = guess
    while value > floor and not admissible(value):
        step *= 2
        value = guess * (1 - min(1.0, step))
    return max(value, floor)


def least(holds: Callable[[float], bool], high: float) -> float:
    """Return the least float in (0, high] for which a condition holds that holds at `high`."""
    low = 0.0
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def times_up(count: float, cost: float) -> float:
    """Return count · cost, rounded up; 0 if either is 0, even for an infinite cost."""
    if cost == 0 or count == 0:
        return 0.0
    return cost if count == 1 else math.nextafter(count * cost, math.inf)


def add_up(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """Return a + b, rounded up element by element; exact if one term is 0."""
    with np.errstate(over="ignore"):
        total = np.add(a, b)
        above = np.nextafter(total, np.inf)
    return np.where(np.equal(a, 0) | np.equal(b, 0), total, above)


def c_alpha(order: float, delta: float) -> float:
    """Return the cost c of turning (order, ε)-RDP into (ε + c, δ)-DP, rounded up.

    c_α(δ) = log((α-1)/α) - (log δ + log α)/(α-1). This is the paper's theorem "Conversion from RDP
    to Approximate DP" (Balle et al. 2020). docs/theory/adapmixed.md proves it for realised losses.

    Args:
        order: Rényi order α > 1, finite.
        delta: δ in (0, 1).

    Returns:
        c, which may be negative.
    """
    # log1p keeps digits for large orders; below 2 the difference order - 1 is exact.
    first = math.log1p(-1 / order) if order >= 2 else math.log((order - 1) / order)
    return sum_up(first, -math.log(delta) / (order - 1), -math.log(order) / (order - 1))


def rdp_to_dp(order: float, epsilon: float, delta: float, adjacency: str = "zero_out") -> float:
    """Return the ε at `delta` that (order, epsilon)-RDP for zero-out implies, rounded up.

    ε = max(0, epsilon + c_α(δ)), since (ε, δ)-DP with ε < 0 implies (0, δ)-DP. The proof is that of
    docs/theory/adapmixed.md with a constant loss (Balle et al. 2020).

    Args:
        order: Rényi order α > 1, finite.
        epsilon: Rényi cost ≥ 0 at that order; +inf allowed.
        delta: δ in (0, 1).
        adjacency: neighbours of the result; "replace_one" is :func:`replace_one_epsilon`.
    """
    if adjacency == "replace_one":
        return replace_one_epsilon(order, epsilon, delta)
    cost = c_alpha(order, delta)
    return max(0.0, cost if epsilon == 0 else up(epsilon + cost))


@lru_cache(maxsize=1024)  # running curves of planned answers ask for the same ε many times
def zcdp_to_dp(rho: float, delta: float) -> float:
    """Return ε of rho-zCDP at `delta`, rounded up.

    rho-zCDP is (α, α rho)-RDP at every α (Bun and Steinke 2016), so ε = min_α α rho + c_α(δ). The
    order may be chosen from rho only because rho is public and fixed in advance; see
    docs/theory/adapmixed.md. Any order is valid, so the search need not be exact. It refines a grid
    in log(order - 1) around its best point.

    Args:
        rho: ρ ≥ 0; +inf allowed.
        delta: δ in (0, 1).
    """
    if rho == 0 or math.isinf(rho):
        return rho

    def cost(position: float) -> float:
        order = 1 + math.exp(position)
        return rdp_to_dp(order, up(order * rho), delta)

    middle, width = 15.0, 30.0  # order - 1 from e^-15 to e^45
    for _ in range(6):
        grid = [middle + width * step / 32 for step in range(-32, 33)]
        middle, width = min(grid, key=cost), width / 16
    return cost(middle)


def emptied_share(epsilon: float, delta: float) -> float:
    """Return the largest δ₁ with (1 + e^epsilon) δ₁ <= delta, rounded down.

    It is the δ of one zero-out step if two steps make a replacement; see "From an emptied shard to
    any change inside it" in docs/concepts/guarantees.md.

    Args:
        epsilon: ε₁ ≥ 0 of one zero-out step.
        delta: δ of both steps together.

    Returns:
        δ₁, or 0 if float64 has no such number.
    """
    if not epsilon <= _LARGEST:
        return 0.0
    whole = (1 + math.exp(epsilon)) * (1 + 2.0**-50)  # exp within 2 ulp, two roundings
    return math.nextafter(delta / whole, 0.0)


def replace_one_epsilon(order: float, spent: float, delta: float) -> float:
    """Return ε at `delta` for replace-one, which is two zero-out steps, rounded up.

    It is 2 ε₁. Here ε₁ ≥ 0 is the least ε with spent + c_α(δ/(1 + e^ε)) <= ε. The proof is in
    docs/concepts/guarantees.md, "From an emptied shard to any change inside it".

    The difference of the two sides is convex in ε, so Newton's steps from 0 rise to its first zero
    and never pass it. Their end is then moved up until float64 arithmetic, rounded up, confirms the
    inequality.

    Args:
        order: Rényi order α > 1, finite.
        spent: Rényi cost of one zero-out step at that order; +inf allowed.
        delta: δ in (0, 1).

    Returns:
        2 ε₁, or +inf if no ε₁ <= 700 is confirmed. For α < 2 there may be none at all.
    """
    once = 0.0
    for _ in range(200):
        share = emptied_share(once, delta)
        if share == 0:
            return math.inf
        above = spent + c_alpha(order, share) - once
        # The slope of the difference, negated: c_α(δ/(1 + e^ε)) rises by logistic(ε)/(α-1).
        fall = 1 - 1 / ((1 + math.exp(-once)) * (order - 1))
        if not above > 0:
            break
        if not fall > 0:
            return math.inf
        if (following := once + above / fall) == once:
            break
        once = following
    step = math.ulp(once)
    for _ in range(40):
        share = emptied_share(once, delta)
        if share == 0:
            break
        if rdp_to_dp(order, spent, share) <= once:
            return 2 * once
        once, step = once + step, 2 * step
    return math.inf


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
    if _delta(mu, 0.0) <= delta:
        return 0.0
    return least(lambda epsilon: _delta(mu, epsilon) <= delta, _LARGEST)


def _delta(mu: float, epsilon: float) -> float:
    """Return the left side of the condition, rounded up."""
    return _normal(epsilon / mu - mu / 2, 1) - math.exp(epsilon) * _normal(
        epsilon / mu + mu / 2, -1
    )


def _normal(x: float, side: int) -> float:
    """Return Φ(-x), rounded up for side 1 and down for side -1."""
    tail = math.erfc(x / math.sqrt(2)) / 2 * (1 + side * _ERROR * (8 + x * x))
    if tail < _LEAST:  # where doubles lose digits
        return _LEAST if side > 0 else 0.0
    return tail
