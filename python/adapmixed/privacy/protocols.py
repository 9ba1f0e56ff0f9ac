"""What the accountant needs of a mechanism and of its proposals, and which mechanisms fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from adapmixed.errors import BudgetSpentError
from adapmixed.privacy.account import Account, Binding, Settings
from adapmixed.privacy.events import Event


class Charged(Protocol):
    """What the accountant needs of a mechanism."""

    @property
    def measure(self) -> tuple[str, float | None] | None:
        """Of its individual charges, ("zcdp", None) or ("renyi", order); None if it has none."""

    @property
    def no_budget(self) -> str:
        """Why no budget of every shard can be kept; "" if one can."""

    @property
    def no_total(self) -> str:
        """Why there is no guarantee without such a budget; "" if there is one."""

    @property
    def no_replacement(self) -> str:
        """Why there is no guarantee for replaced records (replace-one); "" if there is one."""

    @property
    def planned_queries(self) -> int | None:
        """How many queries its guarantee is planned for; None: any number."""


class Proposed(Protocol):
    """What the accountant needs of a proposal; see `mechanisms.Proposal`."""

    @property
    def mechanism(self) -> Charged: ...
    @property
    def num_models(self) -> int: ...
    @property
    def ensemble(self) -> str | None: ...
    def _begin(self) -> Begun: ...


class Begun(Protocol):
    """What the accountant needs of a charge that it has begun; see `mechanisms.single_charge`."""

    def individual_charges(self) -> NDArray[np.float64]: ...
    def events(self, active: NDArray[np.bool_] | None) -> Sequence[Event]: ...
    def settle(self, active: NDArray[np.bool_] | None) -> None: ...
    def fail(self) -> None: ...


def bound_to(
    account: Account, mechanism: Charged, num_models: int, ensemble: str | None
) -> Account:
    """Return the account bound to these, or itself if it is.

    Raises:
        ValueError: it is bound to others, or the mechanism gives no guarantee with its settings.
    """
    _check_fits(mechanism, account.settings)
    measure, order = mechanism.measure or (None, None)
    return account.bound(Binding(repr(mechanism), num_models, measure, order, ensemble))


def _check_fits(mechanism: Charged, settings: Settings) -> None:
    """Raise unless the mechanism's charges give a guarantee under these settings."""
    delta = getattr(mechanism, "delta", settings.delta)
    if delta != settings.delta:
        raise ValueError(
            f"delta must be the mechanism's own, {delta!r}, got an accountant of {settings.delta!r}"
        )
    if settings.adjacency == "replace_one" and mechanism.no_replacement:
        raise ValueError(
            f"adjacency must be 'zero_out' for {type(mechanism).__name__}, got 'replace_one': "
            f"{mechanism.no_replacement}"
        )
    if settings.epsilon is None:
        if mechanism.no_total:
            raise ValueError(mechanism.no_total)
        return
    if mechanism.no_budget:
        raise ValueError(
            f"epsilon must be None for {type(mechanism).__name__}, got {settings.epsilon!r}: "
            f"{mechanism.no_budget}"
        )
    if mechanism.planned_queries is not None:
        raise ValueError(
            f"queries must be None if every shard has a budget, got {mechanism.planned_queries}: "
            "any number of queries keeps it"
        )


def check_left(mechanism: Charged, answered: int, queries: int) -> None:
    """Raise BudgetSpentError unless the mechanism's plan has room for so many queries more."""
    planned = mechanism.planned_queries
    if planned is not None and answered + queries > planned:
        raise BudgetSpentError(
            f"queries must stay within the {planned} that the mechanism was planned for, "
            f"{answered} of which are spent, got up to {queries} more (an answer that ends "
            "early takes fewer, but that is not known beforehand)"
        )
