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
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.checks import check_count, check_real
from adapmixed.privacy.discrete_gaussian import discrete_gaussian
from adapmixed.privacy.fields import (
    ARRAY,
    COUNT,
    REAL,
    WORD,
    optional,
    read_state,
    write_state,
)
from adapmixed.privacy.filter_budget import PLAIN_BUDGET, FilterBudget
from adapmixed.privacy.released_count import ReleasedCount
from adapmixed.privacy.rounding import array_add_up

FORMAT_VERSION = 1
"""Of a filter's state; rises when its fields or their meaning change."""

_FIELDS = {
    "identity": WORD,
    "num_models": COUNT,
    "budget": PLAIN_BUDGET,
    "releases": COUNT,
    "sigma": optional(REAL),
    "spent": ARRAY,
    "left": COUNT,
    "answers": COUNT,
}


class PerModelFilter:
    """Decides, query by query, which slots contribute; remembers what each has spent.

    Threads may share one; a child of a fork may not use its parent's, and there are no copies: they
    would spend the budget twice.

    Attributes:
        identity: tells filters apart; an accountant serves one, or several each of which goes on
            where the one before has stopped (`Accountant.attach`).

    Args:
        num_models: N ≥ 1.
        budget: of every model; what it reserves for noisy counts is spent from the first.
        spent: (N,) float64, what earlier answers under this budget have spent, with what it
            reserves (`individual_spent` of an accountant); None: nothing. How many answers they
            were `Accountant.attach` tells, and how many counts are left the ledger that it is
            attached to, before which it releases none.
    """

    def __init__(
        self,
        num_models: int,
        budget: FilterBudget,
        *,
        spent: NDArray[np.float64] | None = None,
    ) -> None:
        self.identity = secrets.token_hex(16)
        self._lock, self._process = threading.Lock(), os.getpid()
        self.num_models = check_count("num_models", num_models, 1)
        self.budget = budget
        self._left: int | None = budget.releases  # None until a ledger says
        self._record: Callable[[ReleasedCount], object] | None = None
        self._spent = np.full(self.num_models, budget.reserved)
        if spent is not None:
            self._spent = self._checked("spent", spent, (self.num_models,)).copy()
            if (self._spent < budget.reserved).any():
                raise ValueError(
                    f"spent must be >= {budget.reserved!r}, what the budget reserves for counts, "
                    f"got {float(self._spent.min())!r}"
                )
            self._left = None if budget.releases else 0
        self._answers = 0
        _filters.add(self)
        self._serves = self._seeded = False  # an accountant rests on it; seeded counts are out

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a filter must not be copied or pickled: each of the two would spend the budget; "
            "state() and from_state() are for one that goes on where another has stopped"
        )

    @property
    def spent(self) -> NDArray[np.float64]:
        """(N,) float64, what each model has spent, all releases included: private."""
        return self._spent.copy()

    def state(self) -> dict[str, Any]:
        """Settings and what was spent as strict JSON values, exact to the bit: private.

        Raises:
            ValueError: counts were released with seeded noise, or are recorded by a ledger, where
                the filter made from the state would not have to be attached to release them again;
                a child of a fork.
        """
        self._check_process()
        with self._lock:
            if self._seeded:
                raise ValueError("a filter that has released counts with seeded noise has no state")
            if self.budget.releases and (self._left is None or self._record is not None):
                raise ValueError(
                    "a filter that releases counts beside a ledger has no state: one that is made "
                    "with spent=ledger.accountant.individual_spent goes on"
                )
            values = {name: getattr(self, name) for name in ("identity", "num_models", "budget")}
            values |= {"releases": self.budget.releases, "sigma": self.budget.sigma}
            values |= {"spent": self._spent, "left": self._left, "answers": self._answers}
        return write_state("filter", FORMAT_VERSION, _FIELDS, values)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> PerModelFilter:
        """The filter that `state()` was asked of; ValueError where it can be none of this format.

        Two filters that go on from one state spend one budget twice: the statement of the budget
        then holds for neither's answers beside the other's.
        """
        found = read_state("filter", FORMAT_VERSION, _FIELDS, state)
        budget = replace(found["budget"], releases=found["releases"], sigma=found["sigma"])
        made = cls(found["num_models"], budget)
        spent = made._checked("filter.spent", found["spent"], (made.num_models,))
        if (spent < budget.reserved).any() or (spent > budget.amount).any():
            raise ValueError(
                f"filter.spent must lie in [{budget.reserved!r}, {budget.amount!r}], what the "
                f"releases take and what may be spent, got {float(spent.min())!r} to "
                f"{float(spent.max())!r}"
            )
        if not 0 <= found["left"] <= budget.releases:
            raise ValueError(f"filter.left must be in [0, {budget.releases}], got {found['left']}")
        check_count("filter.answers", found["answers"], 0)
        made._spent, made._left, made._answers = spent, found["left"], found["answers"]
        made.identity, made._serves = found["identity"], True
        return made

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where a filter with the same settings had come when its `state()` was asked.

        Raises:
            ValueError: other settings, this filter has already answered or is attached to a
                ledger, a child of a fork, or as `from_state`.
        """
        self._check_process()
        other = PerModelFilter.from_state(state)
        for name in ("num_models", "budget"):
            mine, found = getattr(self, name), getattr(other, name)
            if mine != found:
                raise ValueError(f"filter.{name} must be {mine!r}, got {found!r}")
        with self._lock:
            if self._record is not None:
                raise ValueError("restore needs a filter that is new, got one with a ledger")
            if self._answers or self._left != self.budget.releases:
                raise ValueError(f"restore needs a filter that is new, got {self._answers} answers")
            self._spent, self._left, self._answers = other._spent, other._left, other._answers
            self.identity, self._serves = other.identity, True

    def serve(
        self,
        charged: NDArray[np.float64],
        answers: int,
        released: int,
        record: Callable[[ReleasedCount], object] | None,
    ) -> None:
        """Says that a guarantee rests on this filter from here on: `Accountant.attach` does.

        Args:
            charged: (N,) float64, what each model has been charged by it or before it, with what
                the budget reserves; `spent` is raised to that where it is less.
            answers: how many charges that is the sum of.
            released: with `record`, how many counts were released by it or before it.
            record: is given each count before it is known to anyone; what it raises, `noisy_count`
                does. None: who was given them stays.

        Raises:
            ValueError: it lacks charges of before, or is of another number of models; counts were
                released with seeded noise, or, with `record`, any that no ledger recorded, or more
                than are said; a child of a fork.
        """
        self._check_process()
        # The sums of the same charges may differ, since threads add in another order. Adding ends
        # above the exact sum, by at most 2^-51 of it (of the least float below that) a step; some
        # ulps of the budget more do no harm. What is smaller than all that could be missing unseen,
        # so the filter is raised to `charged`: the guarantee does not depend on the comparison,
        # which is for mistakes.
        rounding = answers * (charged * 2.0**-50 + 5e-324) + 4 * math.ulp(self.budget.amount)
        with self._lock:
            own = self._spent
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
            if record is not None:
                self._left = self._left_beside(released, record)
                self._record = record
            self._spent, self._serves = np.maximum(own, charged), True
            self._answers = max(self._answers, answers)

    def _left_beside(self, released: int, record: Callable[[ReleasedCount], object]) -> int:
        """How many counts are left where so many are recorded."""
        most = self.budget.releases
        if self._left is None:
            return most - released
        # What was released beside no ledger none of those that it holds can be. Attached once more,
        # it may be amid a count that it has taken and not yet recorded.
        known = 0 if self._record is None else released
        if record != self._record and most - self._left > known:
            raise ValueError(
                f"model_filter must have released no counts but the {known} of its own that the "
                f"ledger holds, got {most - self._left}"
            )
        return min(self._left, most - released)

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

    def noisy_count(self, threshold: float, *, rng: Any) -> int:
        """#{i : spent_i > threshold} plus noise, one of the budget's releases, whose cost is no
        part of spent_i; where the filter serves a ledger, recorded there, durably, beforehand.

        The discrete Gaussian on a count of sensitivity 1 (docs/privacy.md, section 13, "Who has
        spent what"), drawn exactly, at the sigma that every model has paid for.

        Args:
            threshold: a public number ≥ 0.
            rng: what it is drawn from: `SecureRandom`, or, where no accountant rests on this
                filter, a source that is seeded.

        Raises:
            ValueError: no release is left, a child of a fork; a source without `bits`, or that is
                seeded, or does not say, beside an accountant; a filter that goes on from `spent`
                and is attached to no ledger.
            LedgerError: the count could not be recorded. It counts as released, and nobody has it.
        """
        threshold = check_real("threshold", threshold, infinite=True)
        self._check_process()
        sigma = self.budget.sigma
        with self._lock:
            if self._left is None:
                raise ValueError(
                    "model_filter must be attached to its ledger (Ledger.attach) before a count: "
                    "how many were released before, the ledger alone knows"
                )
            if self._left == 0 or sigma is None:
                raise ValueError(
                    "releases must be reserved by the filter's budget, got none left of "
                    f"{self.budget.releases}"
                )
            seeded = bool(getattr(rng, "seeded", True))
            if seeded and self._serves:
                raise ValueError(
                    "rng must be SecureRandom() where an accountant rests on the filter, got "
                    f"{type(rng).__name__}: the count is public, and whoever knows a seed can undo "
                    "its noise"
                )
            if not callable(getattr(rng, "bits", None)):
                raise ValueError(
                    "rng must give random bits, as SecureRandom() does, got "
                    f"{type(rng).__name__} without bits(count)"
                )
            noise = self._noise(sigma, rng)
            self._left -= 1
            self._seeded |= seeded
            above = int(np.count_nonzero(self._spent - self.budget.reserved > threshold))
            record = self._record
        count = above + noise
        if record is not None:  # a ledger takes its own lock
            record(ReleasedCount(self.num_models, threshold, sigma, count))
        return count

    def _noise(self, sigma: float, rng: Any) -> int:
        return discrete_gaussian(sigma, rng.bits)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                "a filter must be used in the process that made it: parent and child of a fork "
                "would each spend its budget"
            )

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


_filters: weakref.WeakSet[PerModelFilter] = weakref.WeakSet()


def _leave_in_child() -> None:
    # Besides its process id, which a child in a new namespace can share with its parent. Another
    # thread of the parent may have held a lock at the fork.
    for one in list(_filters):
        one._lock = threading.Lock()
        one._process = 0


os.register_at_fork(after_in_child=_leave_in_child)
