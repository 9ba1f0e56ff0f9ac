"""What every shard may spend, and the (ε, δ) that follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from adapmixed.checks import (
    check_delta,
    check_epsilon,
    check_measure,
    check_question,
    check_real,
)
from adapmixed.privacy.conversions import rdp_to_dp, replace_one_epsilon, zcdp_to_dp
from adapmixed.privacy.rounding import times_up


@dataclass(frozen=True)
class ShardBudget:
    """What the charges of every member may add up to, fixed before the first query.

    The theorem: docs/privacy.md, section 13 (individual Rényi filter, Feldman and Zrnic 2021).

    Attributes:
        measure: "renyi", charges are D↔_order, or "zcdp", charges are ρ.
        amount: B ≥ 0.
        order: Rényi order > 1 for "renyi", None for "zcdp".
    """

    measure: str
    amount: float
    order: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", check_measure(self.measure, self.order))
        object.__setattr__(self, "amount", check_real("amount", self.amount))

    @classmethod
    def for_epsilon(
        cls, epsilon: float, delta: float, order: float | None, adjacency: str = "zero_out"
    ) -> ShardBudget:
        """Return the largest budget whose ε for these neighbours is at most `epsilon`.

        The theorem that it inverts: docs/privacy.md, section 13.

        Args:
            epsilon: > 0.  delta: in (0, 1).
            order: of charges at one Rényi order; None for zCDP.
            adjacency: "zero_out" or "replace_one".

        Raises:
            ValueError: epsilon is not above what the conversion takes at this order and delta.
        """
        return _largest(check_epsilon(epsilon), check_delta(delta), order, adjacency)

    def epsilon(self, delta: float, adjacency: str = "zero_out") -> float:
        """Return ε at δ, rounded up, of any number of tokens: docs/privacy.md, section 13.

        Replace-one passes through the emptied shard: twice the Rényi budget is no bound there, so
        ε(δ₁) doubles with δ₁ = δ/(1 + e^ε(δ₁)) ("renyi"); zCDP composes through it as 4 B ("zcdp").
        """
        return _epsilon(self, check_delta(delta), check_question(adjacency))


@lru_cache(maxsize=256)
def _epsilon(budget: ShardBudget, delta: float, adjacency: str) -> float:
    order, amount = budget.order, budget.amount
    if order is None:
        return zcdp_to_dp(times_up(4, amount) if adjacency == "replace_one" else amount, delta)[0]
    if adjacency == "zero_out":
        return max(0.0, rdp_to_dp(order, amount, delta))
    return replace_one_epsilon(order, amount, delta)


@lru_cache(maxsize=256)
def _largest(epsilon: float, delta: float, order: float | None, adjacency: str) -> ShardBudget:
    measure = "zcdp" if order is None else "renyi"

    def stated(amount: float) -> float:
        return ShardBudget(measure, amount, order).epsilon(delta, adjacency)

    if order is not None and stated(0.0) > epsilon:
        raise ValueError(
            f"epsilon must be > {stated(0.0)!r}, what the conversion takes at "
            f"order {order!r} and delta {delta!r}, got {epsilon!r}"
        )
    low, high = 0.0, 1.0
    while stated(high) <= epsilon:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if stated(middle) <= epsilon else (low, middle)
    return ShardBudget(measure, low, order)
