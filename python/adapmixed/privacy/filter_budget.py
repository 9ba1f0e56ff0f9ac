"""What the models may spend under a per-model filter, and the (ε, δ) that follows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from adapmixed.privacy.checks import (
    check_count,
    check_delta,
    check_measure,
    check_question,
    check_real,
)
from adapmixed.privacy.conversions import gaussian_rho, rdp_to_dp, zcdp_to_dp
from adapmixed.privacy.fields import COUNT, REAL, WORD, optional, record
from adapmixed.privacy.replace_one import replace_one_epsilon
from adapmixed.privacy.rounding import times_up


@dataclass(frozen=True)
class FilterBudget:
    """What every model may spend, and the (ε, δ) that follows; fixed before the first query.

    Attributes:
        measure: "renyi", charges are D↔_order (ClippedMixing), or "zcdp", charges are ρ
            (ClippedLogPool).
        amount: B ≥ 0, what the charges of a model may add up to.
        delta: δ in (0, 1) of the guarantee.
        order: Rényi order > 1 for "renyi", None for "zcdp".
        releases: how many noisy counts of models may be released (`PerModelFilter.noisy_count`),
            all of them paid by every model before the first answer, out of the amount.
        sigma: standard deviation > 0 of their noise; given iff releases > 0.
    """

    measure: str
    amount: float
    delta: float
    order: float | None = None
    releases: int = 0
    sigma: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", check_measure(self.measure, self.order))
        object.__setattr__(self, "amount", check_real("amount", self.amount))
        object.__setattr__(self, "delta", check_delta(self.delta))
        object.__setattr__(self, "releases", check_count("releases", self.releases, 0))
        if (self.sigma is None) != (self.releases == 0):
            raise ValueError(f"sigma must be given iff releases > 0, got {self.sigma!r}")
        if self.sigma is not None:
            object.__setattr__(self, "sigma", check_real("sigma", self.sigma))
        if self.sigma == 0:
            raise ValueError("sigma must be > 0, got 0.0")
        if self.reserved > self.amount:
            raise ValueError(
                f"releases must leave some of the budget of {self.amount!r} for answers, got "
                f"{self.releases} that take {self.reserved!r}"
            )

    def __repr__(self) -> str:
        """As a dataclass's, without the counts where none are reserved."""
        names = ["measure", "amount", "delta", "order"]
        names += ["releases", "sigma"] if self.releases else []
        return f"FilterBudget({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def reserved(self) -> float:
        """What the releases take of the amount, rounded up; public.

        A count changes by at most 1 with one shard: 1/(2σ²) each, times the order for "renyi"
        (docs/privacy.md, section 13, "Who has spent what").
        """
        if self.sigma is None:
            return 0.0
        rho = gaussian_rho(1.0, self.sigma)
        cost = rho if self.order is None else times_up(self.order, rho)
        return times_up(self.releases, cost)

    @property
    def available(self) -> float:
        """What a model's answers may spend, the amount less `reserved`: docs/privacy.md, section
        13, "Who has spent what"; public."""
        return self.amount - self.reserved

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        *,
        order: float | None = None,
        adjacency: str = "zero_out",
        releases: int = 0,
        sigma: float | None = None,
    ) -> FilterBudget:
        """The largest budget whose (ε, δ) for these neighbours is at most (epsilon, delta).

        The inverse of :meth:`epsilon` (docs/privacy.md, section 13).

        Args:
            order: of the charges for ClippedMixing; None for ClippedLogPool, whose best order
                follows from the budget.
            adjacency: as of :meth:`epsilon`.
            releases, sigma: counts that are paid out of it.

        Raises:
            ValueError: epsilon is not above what the conversion takes at this order and delta; no
                budget of that epsilon holds the releases.
        """
        epsilon = check_real("epsilon", epsilon)
        measure = "zcdp" if order is None else "renyi"

        def stated(amount: float) -> float:
            return cls(measure, amount, delta, order).epsilon(adjacency)

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
        return cls(measure, low, delta, order, releases, sigma)

    def epsilon(self, adjacency: str = "zero_out") -> float:
        """ε at δ, rounded up, of any number of tokens as they are drawn.

        The theorem of the per-model filter, and its rounding: docs/privacy.md, section 13.
        Replace-one passes through the emptied shard: twice the Rényi budget is no bound there, so
        ε(δ₁) doubles with δ₁ = δ/(1 + e^ε(δ₁)) ("renyi"); zCDP composes through it as 4 B ("zcdp").

        Raises:
            ValueError: "add_remove": without a model all others' shares change, whatever it spent.
        """
        return _epsilon(self, check_question(adjacency))


@lru_cache(maxsize=256)  # a ledger states it with every charge
def _epsilon(budget: FilterBudget, adjacency: str) -> float:
    if adjacency == "add_remove":
        raise ValueError(
            "adjacency must be 'zero_out' or 'replace_one' under a filter, got 'add_remove': its "
            "charges compare with an emptied slot"
        )
    order, amount, delta = budget.order, budget.amount, budget.delta
    if order is None:
        return zcdp_to_dp(times_up(4, amount) if adjacency == "replace_one" else amount, delta)[0]
    if adjacency == "zero_out":
        return max(0.0, rdp_to_dp(order, amount, delta))
    return replace_one_epsilon(order, amount, delta)


_FIELDS = {"measure": WORD, "amount": REAL, "delta": REAL, "order": optional(REAL)}

PLAIN_BUDGET = record(FilterBudget, _FIELDS)
"""How a budget is written without the counts that it reserves."""

BUDGET = record(FilterBudget, _FIELDS | {"releases": COUNT, "sigma": optional(REAL)})
"""How a budget is written."""
