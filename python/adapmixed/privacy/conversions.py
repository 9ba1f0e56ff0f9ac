"""Rényi differential privacy in closed form: conversion to (ε, δ) and to replace-one.

Every cost is rounded up (`rounding`). Arguments of exact value 0 cost exactly 0. Overflow gives
+inf, the safe direction; nothing raises OverflowError.
"""

from __future__ import annotations

import math
from functools import lru_cache

from adapmixed.checks import check_delta, check_order, check_real
from adapmixed.privacy.rounding import sum_up, up

_LARGEST = 700.0  # e^ε stays finite in float64 up to here; beyond it nothing is stated


def c_alpha(order: float, delta: float) -> float:
    """The cost of turning (order, ε)-RDP into (ε + c, δ)-DP, rounded up; may be negative.

    c_α(δ) = log((α-1)/α) - (log δ + log α)/(α-1)   (Balle et al. 2020; the paper's Theorem rdp-dp;
    docs/privacy.md, sections 1 and 4)

    Args:
        order: α > 1, finite.  delta: in (0, 1).
    """
    order, delta = check_order(order), check_delta(delta)
    # log1p keeps digits for large orders; below 2 the difference order - 1 is exact.
    first = math.log1p(-1 / order) if order >= 2 else math.log((order - 1) / order)
    return sum_up(first, -math.log(delta) / (order - 1), -math.log(order) / (order - 1))


def rdp_to_dp(order: float, epsilon: float, delta: float) -> float:
    """max(0, epsilon + c_α(delta)), rounded up: (order, epsilon)-RDP implies this (ε, δ)-DP.

    A negative sum is stated as 0: (ε, δ)-DP with ε < 0 implies (0, δ)-DP. Proof: docs/privacy.md,
    section 4 with a constant loss (Balle et al. 2020).
    """
    epsilon = check_real("epsilon", epsilon, infinite=True)
    cost = c_alpha(order, delta)
    return max(0.0, cost if epsilon == 0 else up(epsilon + cost))


def zcdp_to_dp(rho: float, delta: float) -> tuple[float, float]:
    """(ε, order) with ε = min over orders of order·rho + c_order(delta), rounded up.

    rho-zCDP is (α, α rho)-RDP at every α (Bun and Steinke 2016; docs/privacy.md, section 5, last
    paragraph): the order may be chosen from rho only because rho is public and fixed beforehand.
    rho = 0 gives (0, inf). Any order is valid, so the search (a grid in log(order - 1), refined
    around its best point) need not be exact.
    """
    return _best_order(check_real("rho", rho, infinite=True), check_delta(delta))


@lru_cache(maxsize=1024)  # running curves of planned answers ask for the same again and again
def _best_order(rho: float, delta: float) -> tuple[float, float]:
    if rho == 0:
        return 0.0, math.inf
    if math.isinf(rho):
        return math.inf, 2.0

    def cost(position: float) -> float:
        order = 1 + math.exp(position)
        return rdp_to_dp(order, up(order * rho), delta)

    middle, width = 15.0, 30.0  # order - 1 from e^-15 to e^45
    for _ in range(6):
        grid = [middle + width * step / 32 for step in range(-32, 33)]
        middle, width = min(grid, key=cost), width / 16
    return cost(middle), 1 + math.exp(middle)


def emptied_share(epsilon: float, delta: float) -> float:
    """The largest δ₁ with (1 + e^epsilon) δ₁ <= delta, rounded down; 0 where float64 has none.

    "From zero-out to records": docs/privacy.md, section 1.

    Args:
        epsilon: ε₁ >= 0, of one zero-out step.  delta: of both together.
    """
    if not epsilon <= _LARGEST:
        return 0.0
    whole = (1 + math.exp(epsilon)) * (1 + 2.0**-50)  # exp within 2 ulp, two roundings
    return math.nextafter(delta / whole, 0.0)


def replace_one_epsilon(order: float, spent: float, delta: float) -> float:
    """2ε₁ at `delta`, rounded up: ε₁ = max(0, spent + c_α(δ₁)) with the largest δ₁ that is left.

    "From zero-out to records": docs/privacy.md, section 1. ε₁ is the least ε >= 0 with
    spent + c_α(δ/(1 + e^ε)) <= ε. The difference of the two sides is convex in ε, so Newton's steps
    from 0 rise to its first zero and never pass it; what they end at is moved up until float64
    arithmetic, rounded up, confirms it.

    Args:
        order: α > 1.  spent: Rényi cost of one zero-out step at that order, +inf allowed.
        delta: in (0, 1).

    Returns:
        float, +inf where no ε₁ <= 700 is confirmed (for α < 2 there may be none at all).
    """
    order, spent = check_order(order), check_real("spent", spent, infinite=True)
    delta = check_delta(delta)
    once = 0.0
    for _ in range(200):
        share = emptied_share(once, delta)
        if share == 0:
            return math.inf
        above = spent + c_alpha(order, share) - once
        # How fast the difference falls with ε: c_α(δ/(1 + e^ε)) rises by logistic(ε)/(α-1).
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
