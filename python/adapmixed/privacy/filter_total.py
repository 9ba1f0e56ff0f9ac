"""Answers under one per-model filter, as an accountant sees them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.events import IndividualCharge
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.fixed_totals import Result
from adapmixed.privacy.released_count import ReleasedCount
from adapmixed.privacy.rounding import array_add_up


@dataclass(frozen=True)
class FilterTotal:
    """Their charges. Immutable.

    Attributes:
        budget: of every model.
        spent: (N,) float64, what each has been charged and what the budget reserves for counts;
            None before the first event.
        counts: the noisy counts that were released.
    """

    budget: FilterBudget
    spent: NDArray[np.float64] | None = field(default=None, compare=False)
    counts: tuple[ReleasedCount, ...] = ()

    def add(self, event: IndividualCharge | ReleasedCount) -> FilterTotal:
        """With one event more.

        Raises:
            ValueError: another measure or order, or charges beyond the budget: no filter ran; more
                counts, or of less noise, than the budget reserves.
        """
        budget = self.budget
        spent = self.spent
        if spent is None:  # as a filter begins, so that the sums are the same
            spent = np.full(event.num_models, budget.reserved)
        if isinstance(event, ReleasedCount):
            self._check_count(event)
            return replace(self, spent=spent, counts=(*self.counts, event))
        if (event.measure, event.order) != (budget.measure, budget.order):
            raise ValueError(
                f"measure and order must be those of the filter's budget, "
                f"{(budget.measure, budget.order)!r}, got {(event.measure, event.order)!r}"
            )
        for position in range(event.queries):
            spent = array_add_up(spent, event.charge[:, position])
        if (spent > budget.amount).any():
            raise ValueError(
                f"charge must stay within the budget of {budget.amount!r} that the filter was made "
                f"for, got a total of {float(spent.max())!r}"
            )
        return replace(self, spent=spent)

    def _check_count(self, event: ReleasedCount) -> None:
        budget = self.budget
        if not budget.releases:
            raise ValueError(
                "releases must be reserved by filter_budget before its first answer, got a noisy "
                "count where none are"
            )
        if event.sigma != budget.sigma:
            raise ValueError(f"sigma must be that of the budget, {budget.sigma!r}, got {event}")
        if len(self.counts) == budget.releases:
            raise ValueError(
                f"releases must stay within the {budget.releases} that the budget reserves, all of "
                "which are released, got one more"
            )

    def evaluate(self, adjacency: str) -> Result:
        """The ε fixed beforehand, whatever was spent (docs/privacy.md, section 13)."""
        total = self.budget.epsilon(adjacency)
        return Result(total, 0.0, 0.0, total, self.budget.order)
