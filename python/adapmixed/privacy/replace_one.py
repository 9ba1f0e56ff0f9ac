"""Replace-one through the emptied shard: any change inside one shard is two zero-out steps.

Two laws that are both (ε₁, δ₁)-close to a third, both ways, are (2ε₁, (1 + e^ε₁) δ₁)-close (group
privacy; docs/privacy.md, section 1). Twice the Rényi budget would be no bound there.
"""

from __future__ import annotations

import math

from adapmixed.privacy.checks import check_delta, check_order, check_real
from adapmixed.privacy.conversions import c_alpha, rdp_to_dp

_LARGEST = 700.0  # e^ε stays finite in float64 up to here; beyond it nothing is stated


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
