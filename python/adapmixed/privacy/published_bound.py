"""The paper's bound of PMixED, which is not valid: it reproduces published numbers only.

Costs are rounded up, admissible values of β down (`rounding`).
"""

from __future__ import annotations

from functools import lru_cache

from adapmixed.privacy.ball_bounds import radius_for_epsilon, sound_bound
from adapmixed.privacy.checks import check_count, check_order, check_rate, check_real
from adapmixed.privacy.conversions import subsampled_rdp
from adapmixed.privacy.rounding import lowered


def published_bound(order: float, target_leakage: float, num_models: int) -> float:
    """The paper's data-independent bound, log((N-1+e^{4βα(α-1)})/N)/(α-1). NOT VALID.

    Its triangle-like lemma needs Rényi bounds at every order, the projection gives one; the true
    add/remove loss can exceed this value without limit (docs/privacy.md, section 3). It reproduces
    published numbers only. N = 1: βα.
    """
    order = check_order(order)
    beta = check_real("target_leakage", target_leakage, infinite=True)
    num_models = check_count("num_models", num_models, 1)
    return sound_bound(order, (4 if num_models > 1 else 1) * beta * order, num_models)


@lru_cache(maxsize=4096)
def published_target_leakage(order: float, epsilon: float, models: int, rate: float = 1.0) -> float:
    """The paper's β for a per-query budget (Algorithm 2, line 3; eq. opt_beta). NOT VALID.

    The largest β, rounded down, such that `published_bound`, amplified by `subsampled_rdp` when
    rate < 1, is at most `epsilon`: closed form at rate 1, else bisection (integer order only).
    See `published_bound` and docs/privacy.md, sections 3 and 6, for why no guarantee follows.

    Args:
        order: α > 1; an integer >= 2 when rate < 1.  epsilon: ε_G / T, finite and >= 0.
        models: N, or the size |S_t| >= 1 of the drawn subset.  rate: in (0, 1].
    """
    order, epsilon = check_order(order), check_real("epsilon", epsilon)
    models, rate = check_count("models", models, 1), check_rate("rate", rate)
    if rate == 0:
        raise ValueError("rate must be in (0, 1], got 0.0")
    if rate < 1 and order != int(order):
        raise ValueError(f"order must be an integer when rate < 1, got {order!r}")
    if epsilon == 0:
        return 0.0

    def admissible(beta: float) -> bool:
        if rate == 1:
            return published_bound(order, beta, models) <= epsilon
        amplified = subsampled_rdp(int(order), rate, lambda k: published_bound(k, beta, models))
        return amplified <= epsilon

    if rate == 1:
        radius = radius_for_epsilon(order, epsilon, models)
        return lowered(radius / ((4 if models > 1 else 1) * order), 0.0, admissible)
    low, high = 0.0, epsilon
    while admissible(high):
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if admissible(middle) else (low, middle)
    return low
