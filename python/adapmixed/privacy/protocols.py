"""Interfaces of mechanisms and tickets for the accountant, and the checks of a mechanism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from numbers import Real
from typing import Protocol

from adapmixed.errors import BudgetSpentError
from adapmixed.limits import check_active, check_count, check_models
from adapmixed.privacy.account import Account, Binding, Settings
from adapmixed.privacy.events import Event, Origin, Pay


class Charged(Protocol):
    """The part of a mechanism that the accountant uses."""

    @property
    def measure(self) -> tuple[str, float | None] | None:
        """Unit of the individual charges: ("zcdp", None), ("renyi", order) or None without any."""

    def largest_charge(self, num_models: int) -> float | None:
        """Largest individual charge of one answer, if its log-ratio has a bounded range."""

    def cost_ahead(self, num_models: int, queries: int) -> Sequence[Event]:
        """Return the cost of queries whose rows do not exist yet; raise if it depends on them."""

    @property
    def no_budget(self) -> str:
        """The reason why per-shard budgets cannot be kept; "" if they can."""

    @property
    def no_total(self) -> str:
        """The reason why there is no guarantee without per-shard budgets; "" if there is one."""

    @property
    def no_replacement(self) -> str:
        """The reason why there is no guarantee for replace-one; "" if there is one."""

    @property
    def planned_queries(self) -> int | None:
        """Number of queries that the guarantee is planned for; None for any number."""


class Payable(Protocol):
    """The part of a ticket that the accountant uses; see `mechanisms.Ticket`."""

    @property
    def mechanism(self) -> Charged: ...
    @property
    def num_models(self) -> int: ...
    @property
    def origin(self) -> Origin: ...
    def charge(self, pay: Pay) -> None: ...


def bound_to(
    account: Account,
    mechanism: Charged,
    num_models: int,
    ensemble: str | None,
    active_tokens: int | None,
    unit: str | None,
) -> Account:
    """Return the account bound to this mechanism and ensemble, or the account if it is already.

    Args:
        account: the account to bind.
        mechanism: how queries are answered.
        num_models: N.
        ensemble: fingerprint of the ensemble; None if it is not known.
        active_tokens: K of the active vocabulary; None if members speak about all tokens.
        unit: the column whose every name has a member of its own; None if shards are protected.

    Raises:
        ValueError: the account is bound to something else, or the mechanism gives no guarantee
            under the account's settings.
    """
    _check_fits(mechanism, account.settings)
    measure, order = mechanism.measure or (None, None)
    models = check_models(num_models)
    largest = mechanism.largest_charge(models)
    active = check_active(active_tokens, "active_tokens")
    described = _described(mechanism)
    binding = Binding(described, models, measure, order, largest, ensemble, active, unit)
    return account.bound(binding)


def _described(mechanism: Charged) -> str:
    """Return the mechanism with its settings; a real number looks alike whatever its type."""
    if not is_dataclass(mechanism):
        return repr(mechanism)
    values = {
        f.name: getattr(mechanism, f.name) for f in fields(mechanism) if "float" in str(f.type)
    }
    changes = {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, Real) and type(value) is not float
    }
    return repr(replace(mechanism, **changes) if changes else mechanism)


def _check_fits(mechanism: Charged, settings: Settings) -> None:
    """Raise ValueError unless the mechanism gives a guarantee under these settings."""
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
    """Raise BudgetSpentError unless the mechanism's plan has room for so many more queries."""
    planned, queries = mechanism.planned_queries, check_count("queries", queries, 0)
    if planned is not None and answered + queries > planned:
        raise BudgetSpentError(
            f"queries must stay within the {planned} that the mechanism was planned for, "
            f"{answered} of which are spent, got up to {queries} more with "
            f"{max(planned - answered, 0)} left: ask for fewer (evaluate: --queries, "
            "else --max-new-tokens)"
        )
