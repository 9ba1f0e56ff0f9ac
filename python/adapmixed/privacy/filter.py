"""The per-model filter: unlimited adaptive queries under an (ε, δ) that is fixed beforehand.

Every slot has a budget. It contributes to an answer iff what it has spent and this charge stay
within it; otherwise it answers q, in silence, and pays nothing. The charge depends on shard i, the
history and public values alone, so that under zero-out the whole history is (ε, δ)-DP (individual
Rényi filter, Feldman & Zrnic 2021; docs/privacy.md, section 13). What a slot has spent, and that it
is retired, is private: for the operator alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.checks import check_count, check_measure, check_question, check_real
from adapmixed.privacy.conversions import rdp_to_dp, zcdp_to_dp
from adapmixed.privacy.events import IndividualCharge
from adapmixed.privacy.fixed_totals import Result
from adapmixed.privacy.rounding import array_add_up, times_up

MAX_ANSWERS = 2**40
"""Answers under one filter: what bounds the part of δ that sampling by integer weights takes."""

# T τ: of MAX_ANSWERS tokens, each drawn within V 2^-99 of the accounted law, for V up to 2^20.
_DRAWN = 2.0 ** (40 + 20 - 99)


@dataclass(frozen=True)
class FilterBudget:
    """What every model may spend, and the (ε, δ) that follows; fixed before the first query.

    Attributes:
        measure: "renyi", charges are D↔_order (ClippedMixing), or "zcdp", charges are ρ
            (ClippedLogPool).
        amount: B ≥ 0, what the charges of a model may add up to.
        delta: δ in (0, 1) of the guarantee.
        order: Rényi order > 1 for "renyi", None for "zcdp".
    """

    measure: str
    amount: float
    delta: float
    order: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", check_measure(self.measure, self.order))
        object.__setattr__(self, "amount", check_real("amount", self.amount))
        object.__setattr__(self, "delta", check_real("delta", self.delta))
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {self.delta!r}")

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        delta: float,
        *,
        order: float | None = None,
        adjacency: str = "zero_out",
    ) -> FilterBudget:
        """The largest budget whose (ε, δ) for these neighbours is at most (epsilon, delta).

        Args:
            order: of the charges for ClippedMixing; None for ClippedLogPool, whose best order
                follows from the budget.
            adjacency: as of :meth:`epsilon`.

        Raises:
            ValueError: epsilon is not above what the conversion takes at this order and delta.
        """
        epsilon = check_real("epsilon", epsilon)
        measure = "zcdp" if order is None else "renyi"

        def stated(amount: float) -> float:
            return cls(measure, amount, delta, order).epsilon(adjacency)

        if order is not None and stated(0.0) > epsilon:
            raise ValueError(
                f"epsilon must be > {stated(0.0):.6g}, what the conversion takes at "
                f"order {order:g} and delta {delta:g}, got {epsilon!r}"
            )
        low, high = 0.0, 1.0
        while stated(high) <= epsilon:
            low, high = high, 2 * high
        for _ in range(200):
            middle = (low + high) / 2
            if middle in (low, high):
                break
            low, high = (middle, high) if stated(middle) <= epsilon else (low, middle)
        return cls(measure, low, delta, order)

    def epsilon(self, adjacency: str = "zero_out") -> float:
        """ε at δ, rounded up; what drawing `MAX_ANSWERS` tokens by integer weights adds is in it.

        Replace-one passes through the emptied shard: twice the Rényi budget is no bound there, so
        ε(δ₁) doubles with δ₁ = δ/(1 + e^ε(δ₁)) ("renyi"); zCDP composes through it as 4 B ("zcdp").
        Add/remove is zero-out for "zcdp" and not covered by charges under zero-out for "renyi".

        Raises:
            ValueError: "add_remove" for "renyi".
        """
        return _epsilon(self, check_question(adjacency))


@lru_cache(maxsize=256)  # a ledger states it with every charge
def _epsilon(budget: FilterBudget, adjacency: str) -> float:
    """The least ε for which the exact law has (ε, δ − (1 + e^ε) T τ), or +inf."""
    epsilon, sampled = -1.0, 0.0
    for _ in range(100):
        delta = budget.delta - sampled
        if not delta > 0:
            break
        found = _of_the_exact_law(budget.order, budget.amount, delta, adjacency)
        if found <= epsilon:
            return epsilon
        epsilon = found
        sampled = times_up(1 + math.exp(min(epsilon, 700.0)), _DRAWN)
    return math.inf


def _of_the_exact_law(order: float | None, amount: float, delta: float, adjacency: str) -> float:
    if order is None:
        return zcdp_to_dp(times_up(4, amount) if adjacency == "replace_one" else amount, delta)[0]
    if adjacency == "add_remove":
        raise ValueError(
            "adjacency must be 'zero_out' or 'replace_one' under a Rényi filter, got "
            "'add_remove': its charges compare with an emptied slot"
        )
    if adjacency == "zero_out":
        return max(0.0, rdp_to_dp(order, amount, delta))
    return _replaced(order, amount, delta)


def _replaced(order: float, amount: float, delta: float) -> float:
    """2ε₁ with (1 + e^ε₁) δ₁ ≤ δ, ε₁ = B + c_α(δ₁): δ₁ as large as that admits."""

    def parts(log_share: float) -> tuple[float, float]:
        share = math.exp(log_share)
        once = max(0.0, rdp_to_dp(order, amount, share))
        return once, (1 + math.exp(min(once, 700.0))) * share

    low, high = -700.0, math.log(delta)
    if not parts(low)[1] <= delta:
        return math.inf
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if parts(middle)[1] <= delta else (low, middle)
    return times_up(2, parts(low)[0])


class PerModelFilter:
    """Decides, query by query, which slots contribute; remembers what each has spent.

    Args:
        num_models: N ≥ 1.
        budget: of every model.
        releases: how many noisy counts may be released, all of them paid by every model when the
            filter is made. No ledger holds that: a filter that goes on from `spent` has none.
        sigma: standard deviation > 0 of their noise; needed iff releases > 0.
        spent: (N,) float64, what earlier answers under this budget have spent; None: nothing.
    """

    def __init__(
        self,
        num_models: int,
        budget: FilterBudget,
        *,
        releases: int = 0,
        sigma: float | None = None,
        spent: NDArray[np.float64] | None = None,
    ) -> None:
        self.num_models = check_count("num_models", num_models, 1)
        self.budget = budget
        self.releases = self._left = check_count("releases", releases, 0)
        if (sigma is None) != (self.releases == 0):
            raise ValueError(f"sigma must be given iff releases > 0, got {sigma!r}")
        if self.releases and spent is not None:
            raise ValueError(
                f"releases must be 0 where spent is given, got {releases}: those of an earlier "
                "filter are not known to this one"
            )
        self.sigma = None if sigma is None else check_real("sigma", sigma)
        if self.sigma == 0:
            raise ValueError("sigma must be > 0, got 0.0")
        self._reserved = times_up(self.releases, self._release_cost())
        if self._reserved > budget.amount:
            raise ValueError(
                f"releases must leave some of the budget of {budget.amount:g} for answers, got "
                f"{releases} at {self._release_cost():g} each"
            )
        self._spent = np.full(self.num_models, self._reserved)
        if spent is not None:
            self._spent = self._checked("spent", spent, (self.num_models,)).copy()
        self._answers = 0

    @property
    def available(self) -> float:
        """What a model's answers may spend: the budget less what the releases take; public."""
        return self.budget.amount - self._reserved

    @property
    def spent(self) -> NDArray[np.float64]:
        """(N,) float64, what each model has spent, all releases included: private."""
        return self._spent.copy()

    def admit(self, charges: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Charges a batch, its positions in order; the slots that contribute.

        Args:
            charges: (N, B) float64, upper bounds ≥ 0 on what each model would be charged, +inf
                allowed, in the budget's measure.

        Returns:
            (N, B) bool: private. A slot that may not contribute is not charged.

        Raises:
            ValueError: shape, dtype, NaN or negative charges, more than `MAX_ANSWERS` answers.
        """
        charges = np.asarray(charges)
        if charges.ndim != 2:
            raise ValueError(f"charges must have shape (N, B), got {charges.shape}")
        shape = (self.num_models, charges.shape[1])
        charges = self._checked("charges", charges, shape)
        if self._answers + shape[1] > MAX_ANSWERS:
            raise ValueError(f"answers under one filter must be at most {MAX_ANSWERS}")
        active = np.zeros(shape, dtype=np.bool_)
        spent = self._spent
        for position in range(shape[1]):
            total = array_add_up(spent, charges[:, position])
            active[:, position] = total <= self.budget.amount
            spent = np.where(active[:, position], total, spent)
        self._spent, self._answers = spent, self._answers + shape[1]
        return active

    def noisy_count(self, threshold: float, noise: float) -> float:
        """#{i : spent_i > threshold} + noise, one of the reserved releases, which are not counted.

        Args:
            threshold: a public number ≥ 0.
            noise: a fresh N(0, sigma²) variate.

        Raises:
            ValueError: no release is left, or a number that is not finite.
        """
        threshold = check_real("threshold", threshold, infinite=True)
        if not math.isfinite(noise):
            raise ValueError(f"noise must be finite, got {noise!r}")
        if self._left == 0:
            raise ValueError("releases must be reserved when the filter is made, got none left")
        self._left -= 1
        return float(np.count_nonzero(self._spent - self._reserved > threshold)) + noise

    def _release_cost(self) -> float:
        """A count changes by at most 1 with one shard: ρ = 1/(2σ²), times the order for "renyi"."""
        if self.sigma is None:
            return 0.0
        rho = math.nextafter(0.5 / (self.sigma * self.sigma), math.inf)
        return rho if self.budget.order is None else times_up(self.budget.order, rho)

    def _checked(
        self, name: str, values: NDArray[np.float64], shape: tuple[int, ...]
    ) -> NDArray[np.float64]:
        values = np.asarray(values)
        if values.dtype != np.float64 or values.shape != shape:
            raise ValueError(
                f"{name} must be float64 of shape {shape}, got {values.dtype} {values.shape}"
            )
        if np.isnan(values).any() or (values < 0).any():
            raise ValueError(f"{name} must be >= 0 and not NaN in every entry")
        return values


@dataclass(frozen=True)
class FilterTotal:
    """Answers under one filter, as an accountant sees them. Immutable."""

    budget: FilterBudget
    spent: NDArray[np.float64] | None = field(default=None, compare=False)

    def add(self, event: IndividualCharge) -> FilterTotal:
        """With one event more.

        Raises:
            ValueError: another measure or order, or charges beyond the budget: no filter ran.
        """
        budget = self.budget
        if (event.measure, event.order) != (budget.measure, budget.order):
            raise ValueError(
                f"measure and order must be those of the filter's budget, "
                f"{(budget.measure, budget.order)!r}, got {(event.measure, event.order)!r}"
            )
        spent = np.zeros(event.num_models) if self.spent is None else self.spent
        for position in range(event.queries):
            spent = array_add_up(spent, event.charge[:, position])
        if (spent > budget.amount).any():
            raise ValueError(
                f"charge must stay within the budget of {budget.amount:g} that the filter was made "
                f"for, got a total of {float(spent.max())!r}"
            )
        return FilterTotal(budget, spent)

    def evaluate(self, adjacency: str) -> Result:
        """The ε fixed beforehand, whatever was spent."""
        total = self.budget.epsilon(adjacency)
        return Result(total, 0.0, 0.0, total, self.budget.order)
