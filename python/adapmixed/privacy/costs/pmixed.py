"""The cost of PMixED's answers, whose distributions lie in a Rényi ball around the public one.

Costs are rounded up and admissible radii down (`rounding`). Arguments of exact value 0 cost exactly
0. Overflow gives +inf, which is the safe direction, and never raises OverflowError.
"""

from __future__ import annotations

import math

from adapmixed.privacy.rounding import log_expm1_up, lowered, softplus_up, sum_up, up

_EXP_LIMIT = 700.0  # exp and expm1 stay finite in float64 below this


def sound_bound(order: float, radius: float, num_models: int, rate: float = 1.0) -> float:
    """Return the loss of one query under zero-out, log(1 + (g/N)(e^{(α-1)R} - 1)) / (α-1).

    It bounds the divergence in both directions if every projected distribution lies in the Rényi
    ball of radius R around the public one, in both directions. The supremum is attained as the mass
    of the token that carries the divergence goes to 0. With N = 1 and g = 1 the bound is R.
    docs/theory/pmixed.md has the proof.

    Args:
        order: Rényi order α > 1.
        radius: R ≥ 0; +inf allowed.
        num_models: N ≥ 1.
        rate: g in [0, 1], if a hidden random subset weighs each member by g/N; 1 without
            subsampling.

    Returns:
        The bound in nats, rounded up; +inf allowed.
    """
    if radius == 0 or rate == 0:
        return 0.0
    share = min(1.0, up(rate / num_models))
    exponent = up((order - 1) * radius)
    if exponent <= _EXP_LIMIT:
        total = up(math.log1p(up(share * up(math.expm1(exponent)))))
    else:
        # log(1 + share (e^x - 1)) <= log(1 + share e^x)
        total = softplus_up(sum_up(exponent, math.log(share)))
    return min(radius, up(total / (order - 1)))  # by convexity the exact value is at most R


def radius_for_epsilon(order: float, epsilon: float, num_models: int) -> float:
    """Return the largest radius R with sound_bound(order, R, num_models) <= epsilon.

    R = log(1 + N (e^{(α-1)ε} - 1)) / (α-1), lowered by a few ulp until the evaluated bound is at
    most epsilon. It inverts the theorem of docs/theory/pmixed.md.

    Args:
        epsilon: Rényi cost ≥ 0 of one query; +inf allowed.

    Returns:
        R, rounded down. epsilon = 0 gives 0; epsilon = inf gives inf.
    """
    if math.isinf(epsilon):
        return math.inf
    exponent = (order - 1) * epsilon
    if exponent == 0:
        return 0.0
    growth = sum_up(log_expm1_up(exponent), math.log(num_models))
    guess = softplus_up(growth) / (order - 1)
    if math.isinf(guess):
        return epsilon  # representable and safe: the bound never exceeds the radius
    return lowered(guess, epsilon, lambda r: sound_bound(order, r, num_models) <= epsilon)
