"""The per-model filter: unlimited adaptive queries under an (ε, δ) that is fixed beforehand.

Every slot has a budget. It contributes to an answer iff what it has spent and this charge stay
within it; otherwise it answers q, in silence, and pays nothing. The charge depends on shard i, the
history and public values alone, so that under zero-out the whole history is (ε, δ)-DP (individual
Rényi filter, Feldman & Zrnic 2021; docs/privacy.md, section 13). What a slot has spent, and that it
is retired, is private: for the operator alone.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.checks import check_count, check_real
from adapmixed.privacy.conversions import gaussian_rho
from adapmixed.privacy.fields import (
    ARRAY,
    COUNT,
    REAL,
    WORD,
    optional,
    read_state,
    write_state,
)
from adapmixed.privacy.filter_budget import BUDGET, FilterBudget
from adapmixed.privacy.rounding import array_add_up, times_up

FORMAT_VERSION = 1
"""Of a filter's state; rises when its fields or their meaning change."""

_FIELDS = {
    "identity": WORD,
    "num_models": COUNT,
    "budget": BUDGET,
    "releases": COUNT,
    "sigma": optional(REAL),
    "spent": ARRAY,
    "left": COUNT,
    "answers": COUNT,
}


class Gaussian(Protocol):
    """`adapmixed_ext.gaussian`, as a filter calls it: one N(0, sigma²) variate."""

    def __call__(self, shape: tuple[()], *, sigma: float, rng: Any) -> SupportsFloat: ...


class PerModelFilter:
    """Decides, query by query, which slots contribute; remembers what each has spent.

    Threads may share one; a child of a fork may not use its parent's, and there are no copies: they
    would spend the budget twice.

    Attributes:
        identity: tells filters apart; an accountant serves one with releases, or several each of
            which goes on where the one before has stopped (`Accountant.attach`).

    Args:
        num_models: N ≥ 1.
        budget: of every model.
        releases: how many noisy counts may be released, all of them paid by every model when the
            filter is made. No ledger holds that: a filter that goes on from `spent` has none.
        sigma: standard deviation > 0 of their noise; needed iff releases > 0.
        spent: (N,) float64, what earlier answers under this budget have spent; None: nothing. How
            many they were `Accountant.attach` tells, and the accountant counts on besides.
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
        self.identity = secrets.token_hex(16)
        self._lock, self._process = threading.Lock(), os.getpid()
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
                f"releases must leave some of the budget of {budget.amount!r} for answers, got "
                f"{releases} at {self._release_cost()!r} each"
            )
        self._spent = np.full(self.num_models, self._reserved)
        if spent is not None:
            self._spent = self._checked("spent", spent, (self.num_models,)).copy()
        self._answers = 0
        self._serves = self._seeded = False  # an accountant rests on it; seeded counts are out

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a filter must not be copied or pickled: each of the two would spend the budget; "
            "state() and from_state() are for one that goes on where another has stopped"
        )

    @property
    def available(self) -> float:
        """What a model's answers may spend: the budget less what the releases take; public.

        A release costs every model α/(2σ²): docs/privacy.md, section 13, "Who has spent what".
        """
        return self.budget.amount - self._reserved

    @property
    def spent(self) -> NDArray[np.float64]:
        """(N,) float64, what each model has spent, all releases included: private."""
        return self._spent.copy()

    def state(self) -> dict[str, Any]:
        """Settings and what was spent as strict JSON values, exact to the bit: private."""
        if self._seeded:
            raise ValueError("a filter that has released counts with seeded noise has no state")
        names = ("identity", "num_models", "budget", "releases", "sigma")
        values = {name: getattr(self, name) for name in names}
        with self._lock:
            values |= {"spent": self._spent, "left": self._left, "answers": self._answers}
        return write_state("filter", FORMAT_VERSION, _FIELDS, values)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PerModelFilter:
        """The filter that `state()` was asked of; ValueError where it can be none of this format.

        Two filters that go on from one state spend one budget twice: the statement of the budget
        then holds for neither's answers beside the other's.
        """
        found = read_state("filter", FORMAT_VERSION, _FIELDS, state)
        made = cls(
            found["num_models"], found["budget"], releases=found["releases"], sigma=found["sigma"]
        )
        spent = made._checked("filter.spent", found["spent"], (made.num_models,))
        if (spent < made._reserved).any() or (spent > made.budget.amount).any():
            raise ValueError(
                f"filter.spent must lie in [{made._reserved!r}, {made.budget.amount!r}], what the "
                f"releases take and what may be spent, got {float(spent.min())!r} to "
                f"{float(spent.max())!r}"
            )
        if not 0 <= found["left"] <= made.releases:
            raise ValueError(f"filter.left must be in [0, {made.releases}], got {found['left']}")
        check_count("filter.answers", found["answers"], 0)
        made._spent, made._left, made._answers = spent, found["left"], found["answers"]
        made.identity, made._serves = found["identity"], True
        return made

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where a filter with the same settings had come when its `state()` was asked.

        Raises:
            ValueError: other settings, this filter has already answered, or as `from_state`.
        """
        other = PerModelFilter.from_state(state)
        for name in ("num_models", "budget", "releases", "sigma"):
            mine, found = getattr(self, name), getattr(other, name)
            if mine != found:
                raise ValueError(f"filter.{name} must be {mine!r}, got {found!r}")
        if self._answers or self._left < self.releases:
            raise ValueError(f"restore needs a filter that is new, got {self._answers} answers")
        self._spent, self._left, self._answers = other._spent, other._left, other._answers
        self.identity, self._serves = other.identity, True

    def serve(self, charged: NDArray[np.float64], answers: int) -> None:
        """Says that a guarantee rests on this filter from here on: `Accountant.attach` does.

        Args:
            charged: (N,) float64, what each model has been charged by it or before it, without
                releases; `spent` is raised to that where it is less.
            answers: how many charges that is the sum of.

        Raises:
            ValueError: it lacks charges of before, or is of another number of models; counts with
                seeded noise were released.
        """
        # The sums of the same charges may differ: threads add in another order, and this one begins
        # at what the releases take. Adding ends above the exact sum, by at most 2^-51 of it (of the
        # least float below that) a step; the reserve is known to some ulps of the budget. What is
        # smaller than all that could be missing unseen, so the filter is raised to `charged`: the
        # guarantee does not depend on the comparison, which is for mistakes.
        rounding = answers * (charged * 2.0**-50 + 5e-324) + 4 * math.ulp(self.budget.amount)
        with self._lock:
            own = self._spent - self._reserved
            if own.shape != charged.shape or (own < charged - rounding).any():
                raise ValueError(
                    "model_filter must hold what its models have spent before: "
                    "PerModelFilter(..., spent=accountant.individual_spent)"
                )
            if self._seeded:
                raise ValueError(
                    "model_filter must not have released counts with seeded noise: whoever knows a "
                    "seed can undo it"
                )
            held = array_add_up(np.full(self.num_models, self._reserved), charged)
            held = np.minimum(held, self.budget.amount)  # where nothing more is admitted
            self._spent, self._serves = np.maximum(self._spent, held), True
            self._answers = max(self._answers, answers)

    def admit(self, charges: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Charges a batch, its positions in order; the slots that contribute.

        A slot contributes iff its charge stays within what is available: the rule of the theorem
        of docs/privacy.md, section 13.

        Args:
            charges: (N, B) float64, upper bounds ≥ 0 on what each model would be charged, +inf
                allowed, in the budget's measure.

        Returns:
            (N, B) bool: private. A slot that may not contribute is not charged.

        Raises:
            ValueError: shape, dtype, NaN or negative charges, a child of a fork.
        """
        charges = np.asarray(charges)
        if charges.ndim != 2:
            raise ValueError(f"charges must have shape (N, B), got {charges.shape}")
        shape = (self.num_models, charges.shape[1])
        charges = self._checked("charges", charges, shape)
        self._check_process()
        active = np.zeros(shape, dtype=np.bool_)
        with self._lock:
            spent = self._spent
            for position in range(shape[1]):
                total = array_add_up(spent, charges[:, position])
                active[:, position] = total <= self.budget.amount
                spent = np.where(active[:, position], total, spent)
            self._spent, self._answers = spent, self._answers + shape[1]
        return active

    def noisy_count(self, threshold: float, gaussian: Gaussian, *, rng: object) -> float:
        """#{i : spent_i > threshold} + N(0, sigma²), one of the releases, which are not counted.

        The Gaussian mechanism on a count of sensitivity 1 (docs/privacy.md, section 13, "Who has
        spent what"). Rounded to an integer, which costs nothing: the last digits of a sum of
        floats tell more than the sum.

        Args:
            threshold: a public number ≥ 0.
            gaussian: `adapmixed_ext.gaussian`, which is asked here for one variate of the sigma
                that every model has paid for.
            rng: what it draws from: `SecureRandom`, or, where no accountant rests on this filter,
                a source that is seeded.

        Raises:
            ValueError: no release is left, a variate that is not finite or exactly 0, a child of a
                fork; a source that is seeded, or does not say, beside an accountant.
        """
        threshold = check_real("threshold", threshold, infinite=True)
        self._check_process()
        with self._lock:
            if self._left == 0 or self.sigma is None:
                raise ValueError("releases must be reserved when the filter is made, got none left")
            seeded = bool(getattr(rng, "seeded", True))
            if seeded and self._serves:
                raise ValueError(
                    "rng must be SecureRandom() where an accountant rests on the filter, got "
                    f"{type(rng).__name__}: the count is public, and whoever knows a seed can undo "
                    "its noise"
                )
            noise = float(gaussian((), sigma=self.sigma, rng=rng))
            if not math.isfinite(noise) or noise == 0:
                raise ValueError(f"gaussian must draw from N(0, sigma²), got {noise!r}")
            self._left -= 1
            self._seeded |= seeded
            above = np.count_nonzero(self._spent - self._reserved > threshold)
        return float(round(float(above) + noise))

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                "a filter must be used in the process that made it: parent and child of a fork "
                "would each spend its budget"
            )

    def _release_cost(self) -> float:
        """A count changes by at most 1 with one shard: ρ = 1/(2σ²), times the order for "renyi"."""
        if self.sigma is None:
            return 0.0
        rho = gaussian_rho(1.0, self.sigma)
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
