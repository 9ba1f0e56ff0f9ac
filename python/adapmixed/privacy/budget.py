"""The budget of every shard, and the (ε, δ) that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from adapmixed.privacy.bounded_range import adaptive_epsilon
from adapmixed.privacy.conversions import larger_order, rdp_to_dp, zcdp_to_dp
from adapmixed.privacy.rounding import times_up


@dataclass(frozen=True)
class ShardBudget:
    """The largest sum of each member's own charges, fixed before the first query.

    The individual Rényi filter (Feldman and Zrnic 2021) turns it into (ε, δ); see
    docs/theory/per-shard-budgets.md.

    Attributes:
        measure: "renyi" if charges are D↔_order, "zcdp" if they are ρ.
        amount: B ≥ 0.
        order: Rényi order > 1 for "renyi", None for "zcdp".
        largest: for "zcdp", largest charge η²/8 of one answer, if all charges are of answers of a
            bounded range; ε is then smaller. None if that is not known.
    """

    measure: str
    amount: float
    order: float | None = None
    largest: float | None = None

    @classmethod
    @lru_cache(maxsize=256)
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        order: float | None,
        adjacency: str = "zero_out",
        largest: float | None = None,
    ) -> ShardBudget:
        """Return the largest budget whose ε for these neighbours is at most `epsilon`.

        It inverts the theorem of docs/theory/per-shard-budgets.md.

        Args:
            epsilon: ε > 0.
            delta: δ in (0, 1).
            order: Rényi order of the charges; None for zCDP.
            adjacency: "zero_out" or "replace_one".
            largest: as in :class:`ShardBudget`.

        Raises:
            ValueError: the conversion to (ε, δ) at this order and delta costs more than epsilon.
        """
        measure = "zcdp" if order is None else "renyi"

        def stated(amount: float) -> float:
            return cls(measure, amount, order, largest).epsilon(delta, adjacency)

        if order is not None and stated(0.0) > epsilon:

            def cost(other: float) -> float:
                return cls(measure, 0.0, other).epsilon(delta, adjacency)

            raise ValueError(
                f"epsilon must be > {stated(0.0)!r}, the cost of the conversion at order {order!r} "
                f"and delta {delta!r}, got {epsilon!r}{larger_order(order, cost, epsilon)}"
            )
        low, high = 0.0, 1.0
        while stated(high) <= epsilon:
            low, high = high, 2 * high
        for _ in range(200):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if stated(middle) <= epsilon else (low, middle)
        return cls(measure, low, order, largest)

    @lru_cache(maxsize=256)  # noqa: B019  (a budget is a few numbers, and the cache is small)
    def epsilon(self, delta: float, adjacency: str = "zero_out") -> float:
        """Return ε at δ for any number of tokens, rounded up.

        The theorem is in docs/theory/per-shard-budgets.md. For replace-one, the statement passes
        through the emptied shard. With "renyi", twice the Rényi budget is no bound there, so the
        result is 2 ε(δ₁) with δ₁ = δ/(1 + e^ε(δ₁)). With "zcdp", all charges become four times as
        large.

        Args:
            delta: δ in (0, 1).
            adjacency: "zero_out" or "replace_one".
        """
        order, amount = self.order, self.amount
        if order is None:
            factor = 4 if adjacency == "replace_one" else 1
            if self.largest is not None:
                largest = times_up(factor, self.largest)
                return adaptive_epsilon(times_up(factor, amount), largest, delta)
            return zcdp_to_dp(times_up(factor, amount), delta)[0]
        return rdp_to_dp(order, amount, delta, adjacency)
