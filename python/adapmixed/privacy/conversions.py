"""Rényi differential privacy in closed form: conversion to (ε, δ), costs, and their inverses.

Every cost is rounded up and every admissible radius down. The rounding is explicit: after each
step that may round, the result moves outward by 4 ulp (`_up`), or a sum moves by 2^-50 times the
sum of the magnitudes of its terms (`_sum_up`). Both exceed the error of IEEE arithmetic together
with a C library whose exp, expm1, log and log1p are within 2 ulp. Arguments of exact value 0 cost
exactly 0. Overflow gives +inf, the safe direction; nothing raises OverflowError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from adapmixed.privacy.checks import check_count, check_delta, check_order, check_real

_SUM_SLACK = 2.0**-50
_EXP_LIMIT = 700.0  # exp and expm1 stay finite in float64 below this


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
    return _sum_up(first, -math.log(delta) / (order - 1), -math.log(order) / (order - 1))


def rdp_to_dp(order: float, epsilon: float, delta: float) -> float:
    """max(0, epsilon + c_α(delta)), rounded up: (order, epsilon)-RDP implies this (ε, δ)-DP.

    A negative sum is stated as 0: (ε, δ)-DP with ε < 0 implies (0, δ)-DP. Proof: docs/privacy.md,
    section 4 with a constant loss (Balle et al. 2020).
    """
    epsilon = check_real("epsilon", epsilon, infinite=True)
    cost = c_alpha(order, delta)
    return max(0.0, cost if epsilon == 0 else _up(epsilon + cost))


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
        return rdp_to_dp(order, _up(order * rho), delta)

    middle, width = 15.0, 30.0  # order - 1 from e^-15 to e^45
    for _ in range(6):
        grid = [middle + width * step / 32 for step in range(-32, 33)]
        middle, width = min(grid, key=cost), width / 16
    return cost(middle), 1 + math.exp(middle)


def gaussian_rdp(order: float, sensitivity: float, sigma: float) -> float:
    """α Δ² / (2 σ²), rounded up: the Rényi cost of the Gaussian mechanism of L2 sensitivity Δ.

    Mironov 2017, Corollary 3; docs/privacy.md, section 7.
    """
    order, rho = check_order(order), gaussian_rho(sensitivity, sigma)
    return 0.0 if rho == 0 else _up(order * rho)


def gaussian_rho(sensitivity: float, sigma: float) -> float:
    """Δ² / (2 σ²), rounded up: the zCDP cost of the Gaussian mechanism of L2 sensitivity Δ.

    Bun and Steinke 2016, Proposition 1.6; docs/privacy.md, section 7.
    """
    ratio = _ratio("sensitivity", sensitivity, sigma)
    return 0.0 if sensitivity == 0 else _up(_up(ratio * ratio) / 2)


def screening_rho(weight: float, sigma: float, num_models: int) -> float:
    """(weight / (N σ))², rounded up: one screening costs order times this at every order.

    The L2 sensitivity is √2 weight / N (noise before re-scaling), so α Δ²/(2σ²) = α (weight/(Nσ))².
    Proof: docs/privacy.md, section 7.
    """
    ratio = _ratio("weight", weight, sigma)
    share = _up(ratio / check_count("num_models", num_models, 1))
    return 0.0 if weight == 0 else _up(share * share)


def screening_rdp(order: float, weight: float, sigma: float, num_models: int) -> float:
    """α (weight / (N σ))², rounded up: the Rényi cost of one noisy screening.

    Proof: docs/privacy.md, section 7.
    """
    order, rho = check_order(order), screening_rho(weight, sigma, num_models)
    return 0.0 if rho == 0 else _up(order * rho)


def subsampled_rdp(order: int, rate: float, epsilon: Callable[[int], float]) -> float:
    """Poisson subsampling at an integer order, rounded up (the paper's eq. subsam_eps).

    What it needs, and why the ball does not give it: docs/privacy.md, sections 6 and 9, item 3.

    ε'(α) = log((1-s)^{α-1}(1+(α-1)s) + Σ_{k=2}^α C(α,k)(1-s)^{α-k} s^k e^{(k-1)ε(k)}) / (α-1)

    The binomial weights sum to 1, so this is log1p of the same sum over k >= 2 with expm1 in place
    of exp: no cancellation for small costs. The sum is formed from logarithms: no overflow.

    Args:
        order: integer α >= 2.  rate: s in [0, 1].
        epsilon: ε(k) >= 0 for k = 2, ..., order: the mechanism must satisfy (k, ε(k))-RDP at every
            one of these orders, not only at the last.
    """
    order, rate = check_count("order", order, 2), _check_rate("rate", rate)
    costs = {k: check_real(f"epsilon({k})", epsilon(k), infinite=True) for k in range(2, order + 1)}
    if rate == 0:
        return 0.0
    if rate == 1:
        return costs[order]
    logs = []
    for k, cost in costs.items():
        if cost > 0:
            weight = (math.log(math.comb(order, k)), k * math.log(rate))
            rest = (order - k) * math.log1p(-rate)
            logs.append(_sum_up(*weight, rest, _log_expm1_up(_up((k - 1) * cost))))
    if not logs:
        return 0.0
    largest = max(logs)
    if math.isinf(largest):
        return math.inf
    total = _sum_up(largest, math.log(_up(math.fsum(math.exp(term - largest) for term in logs))))
    return _up(_softplus_up(total) / (order - 1))


def amplification_rate(sample_rate: float, num_models: int, divide_by: str) -> float:
    """g in [0, 1] such that a hidden Poisson subset at `sample_rate` weighs each member by g/N.

    "slots": the answer is (1/N)[Σ_{i∈S} p̄_i + (N-|S|) q], so g = s. "subset": Σ_{i∈S} p̄_i / |S|
    (q when S is empty), so g = 1 - (1-s)^N, rounded up: dividing by |S| undoes the subsampling.
    Proof: docs/privacy.md, section 2.
    """
    rate = _check_rate("sample_rate", sample_rate)
    num_models = check_count("num_models", num_models, 1)
    if divide_by == "slots":
        return rate
    if divide_by != "subset":
        raise ValueError(f"divide_by must be 'slots' or 'subset', got {divide_by!r}")
    if rate in (0.0, 1.0):
        return rate
    return min(1.0, _up(-math.expm1(_up_magnitude(num_models * math.log1p(-rate)))))


def sound_bound(order: float, radius: float, num_models: int, rate: float = 1.0) -> float:
    """log(1 + (g/N)(e^{(α-1)R} - 1)) / (α-1), rounded up: the loss of one query under zero-out.

    Valid in both directions when every projected distribution lies in the Rényi ball of `radius`
    R (both directions) around the public one; supremum attained as the mass of the token that
    carries the divergence goes to 0. With N = 1 and g = 1 it is R.
    Proof: docs/privacy.md, section 2.

    Args:
        order: α > 1.  radius: R >= 0, +inf allowed.  num_models: N >= 1.
        rate: g, from `amplification_rate`; 1 without subsampling.
    """
    order, radius = check_order(order), check_real("radius", radius, infinite=True)
    num_models, rate = check_count("num_models", num_models, 1), _check_rate("rate", rate)
    if radius == 0 or rate == 0:
        return 0.0
    share = min(1.0, _up(rate / num_models))
    exponent = _up((order - 1) * radius)
    if exponent <= _EXP_LIMIT:
        total = _up(math.log1p(_up(share * _up(math.expm1(exponent)))))
    else:
        # log(1 + share (e^x - 1)) <= log(1 + share e^x)
        total = _softplus_up(_sum_up(exponent, math.log(share)))
    return min(radius, _up(total / (order - 1)))  # by convexity the exact value is at most R


def radius_for_epsilon(order: float, epsilon: float, num_models: int, rate: float = 1.0) -> float:
    """The largest radius R with sound_bound(order, R, num_models, rate) <= epsilon, rounded down.

    R = log(1 + (N/g)(e^{(α-1)ε} - 1)) / (α-1), then lowered by a few ulp until the bound, as it is
    evaluated, is at most epsilon. epsilon = 0 gives 0; epsilon = inf or rate = 0 gives inf. The
    theorem that it inverts: docs/privacy.md, section 2.
    """
    order, epsilon = check_order(order), check_real("epsilon", epsilon, infinite=True)
    num_models, rate = check_count("num_models", num_models, 1), _check_rate("rate", rate)
    if math.isinf(epsilon) or rate == 0:
        return math.inf
    exponent = (order - 1) * epsilon
    if exponent == 0:
        return 0.0
    growth = _sum_up(_log_expm1_up(exponent), math.log(num_models), -math.log(rate))
    guess = _softplus_up(growth) / (order - 1)
    if math.isinf(guess):
        return epsilon  # representable and safe: the bound never exceeds the radius
    return _lower(guess, epsilon, lambda r: sound_bound(order, r, num_models, rate) <= epsilon)


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
    models, rate = check_count("models", models, 1), _check_rate("rate", rate)
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
        return _lower(radius / ((4 if models > 1 else 1) * order), 0.0, admissible)
    low, high = 0.0, epsilon
    while admissible(high):
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if admissible(middle) else (low, middle)
    return low


def _up(value: float) -> float:
    return value + 4 * math.ulp(value)


def _up_magnitude(value: float) -> float:
    return value - 4 * math.ulp(value) if value < 0 else _up(value)


def _sum_up(*terms: float) -> float:
    return math.fsum(terms) + _SUM_SLACK * math.fsum(map(abs, terms))


def _softplus_up(value: float) -> float:
    """log(1 + e^value), rounded up."""
    if value <= 0:
        return _up(math.log1p(_up(math.exp(value))))
    return _up(value + _up(math.log1p(_up(math.exp(-value)))))


def _log_expm1_up(value: float) -> float:
    """log(e^value - 1) for value > 0, rounded up."""
    if value < 1:
        return _sum_up(math.log(_up(math.expm1(value))), _SUM_SLACK)
    return value if math.isinf(value) else _up(value + math.log1p(-math.exp(-value)))


def _lower(guess: float, floor: float, admissible: Callable[[float], bool]) -> float:
    """The first of guess (1 - 2^-52), guess (1 - 2^-51), ... that is admissible, at least floor."""
    step = 2.0**-53
    value = guess
    while value > floor and not admissible(value):
        step *= 2
        value = guess * (1 - min(1.0, step))
    return max(value, floor)


def _ratio(name: str, value: Any, sigma: Any) -> float:
    value, sigma = check_real(name, value), check_real("sigma", sigma)
    if sigma == 0:
        raise ValueError("sigma must be > 0, got 0.0")
    return float(_up(value / sigma))


def _check_rate(name: str, rate: Any) -> float:
    number = check_real(name, rate)
    if number > 1:
        raise ValueError(f"{name} must be in [0, 1], got {rate!r}")
    return number
