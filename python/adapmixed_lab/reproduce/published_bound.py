"""The paper's bound of PMixED, which is not valid and only reproduces published numbers.

Costs are rounded up (`rounding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from adapmixed.limits import check_count, check_number, check_rate
from adapmixed.privacy.costs import sound_bound
from adapmixed.privacy.rounding import log_expm1_up, softplus_up, sum_up, up
from adapmixed_lab.audit.search import last


def published_bound(order: float, target_leakage: float, num_models: int) -> float:
    """Return the paper's data-independent bound, log((N-1+e^{4βα(α-1)})/N)/(α-1). NOT VALID.

    Its triangle-like lemma needs Rényi bounds at every order, but the projection gives one. The
    true add/remove loss can exceed this value without limit (docs/theory/errata.md). Use it only to
    reproduce published numbers. For N = 1 it is βα.
    """
    order = check_number("order", order, above=1.0)
    beta = check_number("target_leakage", target_leakage, least=0.0, infinite=True)
    num_models = check_count("num_models", num_models, 1)
    return sound_bound(order, (4 if num_models > 1 else 1) * beta * order, num_models)


@lru_cache(maxsize=4096)
def published_target_leakage(order: float, epsilon: float, models: int, rate: float = 1.0) -> float:
    """Return the paper's β of a per-query budget (Algorithm 2, line 3; eq. opt_beta). NOT VALID.

    This is the largest β, by bisection, such that `published_bound` is at most `epsilon`. If rate <
    1, the bound is first amplified by `subsampled_rdp`. Why no guarantee follows: `published_bound`
    and docs/theory/errata.md.

    Args:
        order: α > 1; an integer >= 2 if rate < 1.
        epsilon: ε_G / T, finite and >= 0.
        models: N, or the size |S_t| >= 1 of the drawn subset.
        rate: in (0, 1].
    """
    order = check_number("order", order, above=1.0)
    epsilon = check_number("epsilon", epsilon, least=0.0)
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

    return last(admissible)


def subsampled_rdp(order: int, rate: float, epsilon: Callable[[int], float]) -> float:
    """Return the cost under Poisson subsampling, rounded up (the paper's eq. subsam_eps).

    Why the ball does not give what it needs: docs/theory/errata.md, "The subsampling formula is
    given too little".

    ε'(α) = log((1-s)^{α-1}(1+(α-1)s) + Σ_{k=2}^α C(α,k)(1-s)^{α-k} s^k e^{(k-1)ε(k)}) / (α-1)

    The binomial weights sum to 1, so this is log1p of the same sum over k >= 2 with expm1 in place
    of exp. Small costs then do not cancel. The sum is formed from logarithms and does not overflow.

    Args:
        order: integer α >= 2.
        rate: s in [0, 1].
        epsilon: ε(k) >= 0 for k = 2, ..., order. The mechanism must satisfy (k, ε(k))-RDP at every
            one of these orders, not only at the last.
    """
    order, rate = check_count("order", order, 2), check_rate("rate", rate)
    costs = {
        k: check_number(f"epsilon({k})", epsilon(k), least=0.0, infinite=True)
        for k in range(2, order + 1)
    }
    if rate == 0:
        return 0.0
    if rate == 1:
        return costs[order]
    logs = []
    for k, cost in costs.items():
        if cost > 0:
            weight = (math.log(math.comb(order, k)), k * math.log(rate))
            rest = (order - k) * math.log1p(-rate)
            logs.append(sum_up(*weight, rest, log_expm1_up(up((k - 1) * cost))))
    if not logs:
        return 0.0
    largest = max(logs)
    if math.isinf(largest):
        return math.inf
    total = sum_up(largest, math.log(up(math.fsum(math.exp(term - largest) for term in logs))))
    return up(softplus_up(total) / (order - 1))
