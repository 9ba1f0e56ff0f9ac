"""Answers under one per-model filter, as an accountant sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.events import IndividualCharge
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.fixed_totals import Result
from adapmixed.privacy.rounding import array_add_up


@dataclass(frozen=True)
class FilterTotal:
    """Their charges. Immutable."""

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
                f"charge must stay within the budget of {budget.amount!r} that the filter was made "
                f"for, got a total of {float(spent.max())!r}"
            )
        return FilterTotal(budget, spent)

    def evaluate(self, adjacency: str) -> Result:
        """The ε fixed beforehand, whatever was spent (docs/privacy.md, section 13)."""
        total = self.budget.epsilon(adjacency)
        return Result(total, 0.0, 0.0, total, self.budget.order)
