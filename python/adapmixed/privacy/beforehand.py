"""What can be said of AdaPMixED before it answers: a bound on its loss, never its ε."""

from __future__ import annotations

from dataclasses import dataclass

from adapmixed.checks import (
    check_count,
    check_delta,
    check_epsilon,
    check_order,
    check_question,
    check_real,
)
from adapmixed.privacy.conversions import rdp_to_dp, replace_one_epsilon
from adapmixed.privacy.costs.adapmixed import screening_rdp
from adapmixed.privacy.costs.pmixed import sound_bound

ORDER, LEAKAGE = 18.0, 0.2
SCREEN_WEIGHT, SIGMA = 1e-4, 1e-2
"""α, β, λ_s and σ of the paper's WikiText-103 and One Billion Word."""


@dataclass(frozen=True)
class Beforehand:
    """AdaPMixED's numbers that do not depend on private data: those of its fixed loss.

    The ε that AdaPMixED reports is a function of the private data, for the operator alone.

    Attributes:
        order: α.  target_leakage: β of the paper.
        epsilon: what all queries cost at most at that β, every one screened; +inf allowed.
        largest_leakage: the largest β whose fixed loss keeps the target, rounded down; None if no
            ball does.
    """

    order: float
    target_leakage: float
    epsilon: float
    largest_leakage: float | None


def adapmixed_beforehand(
    epsilon: float,
    delta: float,
    num_models: int,
    queries: int,
    adjacency: str = "zero_out",
    *,
    order: float = ORDER,
    target_leakage: float = LEAKAGE,
    screen_weight: float = SCREEN_WEIGHT,
    sigma: float = SIGMA,
) -> Beforehand:
    """The sound worst case of AdaPMixED, as ``AdaPMixED(loss="fixed")`` is charged.

    T (sound_bound(α, βα, N) + screening) + c_α(δ), rounded up: the theorem of docs/privacy.md,
    section 2, with section 7 for the screening; replace-one passes through the emptied shard
    (section 1).

    Args:
        epsilon: > 0, the target.  delta: in (0, 1).
        num_models: N.  queries: T.
        adjacency: "zero_out" or "replace_one".
        order: α > 1.  target_leakage: β.  screen_weight: λ_s.  sigma: σ; λ_s = 0: no screening.
    """
    target, delta, order = check_epsilon(epsilon), check_delta(delta), check_order(order)
    models, queries = check_count("num_models", num_models, 1), check_count("queries", queries, 1)
    beta = check_real("target_leakage", target_leakage)
    screening = screening_rdp(order, screen_weight, sigma, models)
    check_question(adjacency)

    def cost(leakage: float) -> float:
        single = sound_bound(order, leakage * order, models) + screening
        spent = queries * single * (1 + 2.0**-50)
        if adjacency == "zero_out":
            return rdp_to_dp(order, spent, delta)
        return replace_one_epsilon(order, spent, delta)

    low, high = 0.0, 1.0
    if cost(0.0) > target:  # screening and conversion alone take more
        return Beforehand(order, beta, cost(beta), None)
    while cost(high) <= target:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if cost(middle) <= target else (low, middle)
    return Beforehand(order, beta, cost(beta), low)
