"""What an answer costs whose distributions lie in a Rényi ball around the public one (PMixED).

Costs are rounded up, admissible radii down (`rounding`). Arguments of exact value 0 cost exactly 0.
Overflow gives +inf, the safe direction; nothing raises OverflowError.
"""

from __future__ import annotations

import math

from adapmixed.checks import check_count, check_order, check_rate, check_real
from adapmixed.privacy.rounding import log_expm1_up, lowered, softplus_up, sum_up, up

_EXP_LIMIT = 700.0  # exp and expm1 stay finite in float64 below this


def sound_bound(order: float, radius: float, num_models: int, rate: float = 1.0) -> float:
    """log(1 + (g/N)(e^{(α-1)R} - 1)) / (α-1), rounded up: the loss of one query under zero-out.

    Valid in both directions when every projected distribution lies in the Rényi ball of `radius`
    R (both directions) around the public one; supremum attained as the mass of the token that
    carries the divergence goes to 0. With N = 1 and g = 1 it is R.
    Proof: docs/privacy.md, section 2.

    Args:
        order: α > 1.  radius: R >= 0, +inf allowed.  num_models: N >= 1.
        rate: g, if a hidden random subset weighs each member by g/N; 1 without subsampling.
    """
    order, radius = check_order(order), check_real("radius", radius, infinite=True)
    num_models, rate = check_count("num_models", num_models), check_rate("rate", rate)
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


def radius_for_epsilon(order: float, epsilon: float, num_models: int, rate: float = 1.0) -> float:
    """The largest radius R with sound_bound(order, R, num_models, rate) <= epsilon, rounded down.

    R = log(1 + (N/g)(e^{(α-1)ε} - 1)) / (α-1), then lowered by a few ulp until the bound, as it is
    evaluated, is at most epsilon. epsilon = 0 gives 0; epsilon = inf or rate = 0 gives inf. The
    theorem that it inverts: docs/privacy.md, section 2.
    """
    order, epsilon = check_order(order), check_real("epsilon", epsilon, infinite=True)
    num_models, rate = check_count("num_models", num_models), check_rate("rate", rate)
    if math.isinf(epsilon) or rate == 0:
        return math.inf
    exponent = (order - 1) * epsilon
    if exponent == 0:
        return 0.0
    growth = sum_up(log_expm1_up(exponent), math.log(num_models), -math.log(rate))
    guess = softplus_up(growth) / (order - 1)
    if math.isinf(guess):
        return epsilon  # representable and safe: the bound never exceeds the radius
    return lowered(guess, epsilon, lambda r: sound_bound(order, r, num_models, rate) <= epsilon)
