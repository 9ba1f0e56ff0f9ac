"""Bounds on AdaPMixED's privacy loss that hold before it answers."""

from __future__ import annotations

from dataclasses import dataclass

from adapmixed.limits import (
    MOST_EXPONENT,
    check_delta,
    check_epsilon,
    check_leakage,
    check_models,
    check_number,
    check_order,
    check_queries,
    check_question,
    check_sigma,
)
from adapmixed.privacy.conversions import rdp_to_dp, replace_one_epsilon
from adapmixed.privacy.costs.adapmixed import screening_rdp
from adapmixed.privacy.costs.pmixed import sound_bound

ORDER, LEAKAGE = 18.0, 0.2
SCREEN_WEIGHT, SIGMA = 1e-4, 1e-2
"""λ_s and σ, with α and β above, of the paper's WikiText-103 and One Billion Word."""


@dataclass(frozen=True)
class Beforehand:
    """The bounds of AdaPMixED's fixed loss, which do not depend on private data.

    The ε that AdaPMixED reports is a function of the private data and is for the operator alone.

    Attributes:
        order: Rényi order α.
        target_leakage: β of the paper.
        epsilon: largest cost of all queries at that β if all are screened; +inf allowed.
        largest_leakage: the largest β whose fixed loss stays within the target, rounded down.
            None if even β = 0 exceeds it.
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
    """Return the sound worst case of AdaPMixED, which ``AdaPMixED(loss="fixed")`` charges.

    ε = T (sound_bound(α, βα, N) + α (λ_s/(Nσ))²) + c_α(δ), rounded up. The bound is the theorem of
    docs/theory/pmixed.md, and docs/theory/adapmixed.md adds the screening. For replace-one, the
    conversion through the emptied shard is in docs/concepts/guarantees.md.

    Args:
        epsilon: target ε > 0.
        delta: δ in [1e-15, 0.1].
        num_models: N.
        queries: T, number of queries.
        adjacency: "zero_out" or "replace_one".
        order: Rényi order α in (1, 1 024].
        target_leakage: β ≥ 0.
        screen_weight: λ_s ≥ 0; 0 for no screening.
        sigma: σ ≥ 1e-6, standard deviation of the screening noise.

    Raises:
        ValueError: an argument is out of range.
    """
    target, delta, order = check_epsilon(epsilon), check_delta(delta), check_order(order)
    models, queries = check_models(num_models), check_queries(queries)
    beta = check_leakage(target_leakage, order)
    weight = check_number("screen_weight", screen_weight, least=0.0, most=1.0)
    screening = screening_rdp(order, weight, check_sigma(sigma), models)
    check_question(adjacency)

    def cost(leakage: float) -> float:
        single = sound_bound(order, leakage * order, models) + screening
        spent = queries * single * (1 + 2.0**-50)
        if adjacency == "zero_out":
            return rdp_to_dp(order, spent, delta)
        return replace_one_epsilon(order, spent, delta)

    if cost(0.0) > target:  # screening and conversion alone take more
        return Beforehand(order, beta, cost(beta), None)
    low, high = 0.0, MOST_EXPONENT / ((order - 1) * order) * (1 - 2.0**-50)
    if cost(high) <= target:
        return Beforehand(order, beta, cost(beta), high)
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if cost(middle) <= target else (low, middle)
    return Beforehand(order, beta, cost(beta), low)
