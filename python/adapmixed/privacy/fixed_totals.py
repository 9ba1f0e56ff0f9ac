"""Totals of the mechanisms whose guarantee is fixed beforehand: ClippedMixing, ClippedLogPool.

Both are immutable: adding an event gives another total or a ValueError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from adapmixed.privacy.bounded_range import bounded_range_rho
from adapmixed.privacy.composition import clipped_mixing_epsilon
from adapmixed.privacy.conversions import c_alpha, screening_rho, zcdp_to_dp
from adapmixed.privacy.events import BoundedRangeAnswer, ClippedAnswer, GaussianScreening
from adapmixed.privacy.rounding import add_up, times_up


@dataclass(frozen=True)
class Result:
    """Parts of an ε; mixing + screening + conversion <= total (rounded up, >= 0).

    `order` is the Rényi order that gives it, None without one.
    """

    mixing: float
    screening: float
    conversion: float
    total: float
    order: float | None


@dataclass(frozen=True)
class ScreeningTotal:
    """All noisy screenings: zCDP `rho` in sum, and of one where all have the same cost."""

    rho: float = 0.0
    screened: int = 0
    single: float | None = 0.0  # None: different costs

    def add(self, event: GaussianScreening) -> ScreeningTotal:
        """With `event.queries` screenings more."""
        if not event.queries:
            return self
        rho = screening_rho(event.weight, event.sigma, event.num_models)
        single = rho if self.screened == 0 or self.single == rho else None
        total = add_up(self.rho, times_up(event.queries, rho))
        return ScreeningTotal(total, self.screened + event.queries, single)

    def evaluate(self, delta: float, other: float = 0.0) -> Result:
        """ε with `other`, a zCDP cost besides: both are public, so the best order is known.

        docs/privacy.md, section 7, and section 5, last paragraph.
        """
        rho = add_up(self.rho, other)
        total, order = zcdp_to_dp(rho, delta)
        if math.isinf(order):
            return Result(0.0, 0.0, 0.0, total, None)
        parts = times_up(order, other), times_up(order, self.rho), c_alpha(order, delta)
        return Result(*parts, max(total, math.fsum(parts)), order)


@dataclass(frozen=True)
class ClippedTotal:
    """Answers of one ClippedMixing: one box, one N, one budget, charged with the first query."""

    setting: ClippedAnswer | None = None
    answered: int = 0

    def add(self, event: ClippedAnswer) -> ClippedTotal:
        """With `event.queries` answers more."""
        if event.budget is None:
            raise ValueError(
                "budget of a ClippedAnswer must be an integer >= 1, got None: its guarantee is "
                "composed for a number of queries that is fixed beforehand"
            )
        known, found = self.setting, replace(event, queries=0)
        if known is not None and known != found:
            names = [
                n for n in ("lower", "upper", "num_models", "budget") if _differ(known, found, n)
            ]
            was, now = ({n: getattr(e, n) for n in names} for e in (known, found))
            raise ValueError(
                f"{' and '.join(names)} must be the same in every ClippedAnswer, got {now!r} after "
                f"{was!r}: the pair that bounds one answer and the number of answers must be fixed "
                f"beforehand; another box needs another accountant, whose ε and δ add"
            )
        answered = self.answered + event.queries
        _check_budget(answered, event.budget, "queries")
        return ClippedTotal(found, answered)

    def evaluate(self, delta: float, adjacency: str, screening: ScreeningTotal) -> Result:
        """ε of the whole budget, each query screened at the cost of one if any was.

        Composition: docs/privacy.md, section 11.
        """
        setting = self.setting
        assert setting is not None and setting.budget is not None
        box = (setting.lower, setting.upper, setting.num_models, setting.budget, delta, adjacency)
        mixing = clipped_mixing_epsilon(*box)
        total = mixing
        if screening.single:
            total = max(mixing, clipped_mixing_epsilon(*box, screening=screening.single))
        return Result(mixing, max(0.0, total - mixing), 0.0, total, None)

    def check_screening(self, screening: ScreeningTotal, unscreened: int) -> None:
        """Refuses screenings that are not part of the plan.

        Args:
            unscreened: answers before the call that brought the first screening.
        """
        if self.setting is None or screening.screened == 0:
            return
        if unscreened:
            raise ValueError(
                "screening must begin with the first query of a ClippedAnswer's budget, got one "
                f"after {unscreened} answers: the guarantee is fixed beforehand"
            )
        assert self.setting.budget is not None
        if screening.single is None:
            raise ValueError(
                "weight and sigma must be the same in every GaussianScreening beside a "
                "ClippedAnswer, got different ones: its budget is composed with one screening cost"
            )
        _check_budget(screening.screened, self.setting.budget, "screened queries")

    @property
    def planned_queries(self) -> int:
        """Answered queries of the budget."""
        return self.answered

    @property
    def budget(self) -> int | None:
        """How many queries the guarantee covers."""
        return self.setting.budget if self.setting is not None else None


POOL_WAYS = {"rho": "zero_out", "removed": "add_remove", "replaced": "replace_one"}
"""The sums of a `PoolTotal`, and the neighbours that each is for."""


@dataclass(frozen=True)
class PoolTotal:
    """Answers of ClippedLogPool: Σ η²/8 as zCDP, charged as they come or for a budget at once."""

    rho: float = 0.0  # zero-out
    removed: float = 0.0  # add/remove
    replaced: float = 0.0  # replace-one
    plan: BoundedRangeAnswer | None = None
    answered: int = 0  # of the plan
    unplanned: bool = False
    constant_models: bool | None = None  # of every event; None before the first

    def add(self, event: BoundedRangeAnswer) -> PoolTotal:
        """With `event.queries` answers more."""
        charged, plan, answered = event.queries, self.plan, self.answered
        if event.budget is not None:
            found = replace(event, queries=0)
            if plan is not None and plan != found:
                raise ValueError(
                    f"settings and budget must be the same in every planned BoundedRangeAnswer, "
                    f"got {found!r} after {plan!r}"
                )
            answered += event.queries
            _check_budget(answered, event.budget, "queries")
            charged, plan = (event.budget if plan is None else 0), found
        setting = (event.scale, event.lower, event.upper, event.num_models)
        constant = event.constant_models
        if self.constant_models not in (None, constant):
            raise ValueError(
                f"constant_models must be the same in every BoundedRangeAnswer, got {constant} "
                f"after {self.constant_models}: another accountant is for the others, whose ε and "
                "δ add"
            )
        rho, removed, replaced = (
            times_up(charged, bounded_range_rho(*setting, way, constant_models=constant))
            for way in POOL_WAYS.values()
        )
        return PoolTotal(
            add_up(self.rho, rho),
            add_up(self.removed, removed),
            add_up(self.replaced, replaced),
            plan,
            answered,
            self.unplanned or (event.budget is None and event.queries > 0),
            constant,
        )

    def evaluate(self, delta: float, adjacency: str, screening: ScreeningTotal) -> Result:
        """ε at the best order, known beforehand since ρ is (docs/privacy.md, section 12)."""
        (rho,) = (getattr(self, name) for name, way in POOL_WAYS.items() if way == adjacency)
        return screening.evaluate(delta, rho)

    @property
    def planned_queries(self) -> int:
        """Answered queries of the plan."""
        return self.answered

    @property
    def budget(self) -> int | None:
        """How many queries the guarantee covers; None where it covers those answered."""
        return self.plan.budget if self.plan is not None and not self.unplanned else None


def _differ(a: ClippedAnswer, b: ClippedAnswer, name: str) -> bool:
    return bool(getattr(a, name) != getattr(b, name))


def _check_budget(answered: int, budget: int, what: str) -> None:
    if answered > budget:
        raise ValueError(
            f"{what} must stay within the budget of {budget} that the guarantee was planned "
            f"for, got {answered}"
        )
