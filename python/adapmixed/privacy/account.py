"""The immutable content of an accountant: settings, binding and totals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.limits import check_delta, check_epsilon, check_question
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.encoding import check_keys, exactly, read_fields, write_fields
from adapmixed.privacy.epsilon import Parts, guarantee_of, parts_of
from adapmixed.privacy.events import Event, IndividualCharge
from adapmixed.privacy.events_json import read_totals, write_totals
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.totals import Totals


@dataclass(frozen=True)
class Settings:
    """The settings of an accountant.

    Attributes:
        delta: δ in [1e-15, 0.1].
        epsilon: ε of every shard's own budget; None without budgets.
        adjacency: neighbours of the statement, "zero_out" or "replace_one".
    """

    delta: float
    epsilon: float | None
    adjacency: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", check_delta(self.delta))
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", check_epsilon(self.epsilon))
        check_question(self.adjacency)


@dataclass(frozen=True)
class Binding:
    """The mechanism and ensemble whose charges add up to one total.

    Attributes:
        mechanism: the mechanism's `repr`.
        num_models: N.
        measure: unit of the individual charges, "renyi" or "zcdp"; None without such charges.
        order: Rényi order of the individual charges; None without one.
        largest: largest individual charge of one answer, if answers have a bounded range.
        ensemble: the ensemble's fingerprint; None for logits made by hand.
        active_tokens: K of the active vocabulary; None if members speak about all tokens.
        unit: the column whose every name has a member of its own; None if shards are protected.
    """

    mechanism: str
    num_models: int
    measure: str | None
    order: float | None
    largest: float | None
    ensemble: str | None
    active_tokens: int | None
    unit: str | None = None

    def written(self) -> dict[str, Any]:
        """Return the binding as JSON values, with its unit if there is one."""
        found = write_fields(self)
        return found if self.unit is not None else {k: v for k, v in found.items() if k != "unit"}

    @staticmethod
    def read(written: Any) -> Binding:
        """Return the binding that the method `written` has written.

        Raises:
            ValueError: a field is missing, unknown or not valid.
        """
        return read_fields(Binding, {**exactly(dict, written), "unit": written.get("unit")})


@dataclass(frozen=True)
class Account:
    """The charges so far, and the settings and binding that they fall under.

    Attributes:
        settings: settings of the accountant.
        binding: None before the first ticket is charged, and if only events were added.
        budget: budget of every shard; None until the binding or an individual charge fixes it.
        totals: sum of all charges.
    """

    settings: Settings
    binding: Binding | None = None
    budget: ShardBudget | None = None
    totals: Totals = field(default_factory=Totals)

    def bound(self, binding: Binding) -> Account:
        """Return the account with this binding, or this account if it has it already.

        Raises:
            ValueError: the account has another binding, or events were added to it.
        """
        if self.binding == binding:
            return self
        if self.binding is None and self.totals != Totals():
            raise ValueError(
                "accountant must have charged nothing before it is bound to a mechanism, got one "
                "to which events were added: tickets need an accountant of their own"
            )
        if self.binding is not None:
            names = [
                name
                for name in vars(binding)
                if getattr(binding, name) != getattr(self.binding, name)
            ]
            # A fingerprint is a digest of the private members, so no message shows it.
            told = [name for name in names if name not in ("ensemble", "largest")]
            was, now = ({n: getattr(one, n) for n in told} for one in (self.binding, binding))
            differ = f"{was!r}, got {now!r}" if told else "got another ensemble"
            raise ValueError(
                f"accountant must be charged for what it is bound to, {differ}: "
                "another mechanism or ensemble, also one with a member retrained or withdrawn, "
                "needs an accountant of its own (another --ledger), whose ε and δ add"
            )
        budget = self._budget(binding.measure, binding.order, binding.largest)
        return replace(self, binding=binding, budget=budget)

    def added(self, events: Iterable[Event]) -> Account:
        """Return the account with all of these events.

        Raises:
            ValueError: one of the events cannot be added.
        """
        listed, budget = list(events), self.budget
        for event in listed:
            if budget is None and isinstance(event, IndividualCharge):
                budget = self._budget(event.measure, event.order)
        # Without a binding, the unit of a budget is not known before the first charge.
        limit = budget
        if limit is None and self.settings.epsilon is not None:
            limit = ShardBudget("zcdp", 0.0)
        totals = self.totals.add(listed, limit)
        return replace(self, budget=budget, totals=totals)

    def _budget(
        self, measure: str | None, order: float | None, largest: float | None = None
    ) -> ShardBudget | None:
        epsilon, delta = self.settings.epsilon, self.settings.delta
        if epsilon is None or measure is None:
            return None
        adjacency = self.settings.adjacency
        return ShardBudget.for_epsilon(epsilon, delta, order, adjacency, largest)

    def guarantee(self, delta: float, adjacency: str) -> Guarantee:
        """Return the guarantee of all charges; see `guarantee_of`."""
        found = guarantee_of(self.totals, delta, adjacency, self.budget)
        if self.binding is None or self.binding.unit is None:
            return found
        return replace(found, unit=repr(self.binding.unit))

    def parts(self) -> Parts:
        """Return the parts of ε; see `parts_of`."""
        settings = self.settings
        return parts_of(self.totals, settings.delta, settings.adjacency, self.budget)

    def fixed_epsilon(self, delta: float) -> float:
        """Return ε at this δ.

        Raises:
            ValueError: the total is not fixed.
        """
        found = self.guarantee(delta, self.settings.adjacency)
        if found.kind not in ("fixed", "public") or found.epsilon is None:
            raise ValueError(
                f"epsilon must be that of a fixed total, got one of kind {found.kind!r}: "
                "guarantee() says what can be stated"
            )
        return found.epsilon

    def spent(self) -> NDArray[np.float64]:
        """Return (N,) float64, what each shard has spent. Private.

        Raises:
            ValueError: the shards have no budget, or N is not known.
        """
        models = self.totals.num_models
        if models is None and self.binding is not None:
            models = self.binding.num_models
        if self.settings.epsilon is None:
            raise ValueError("spent needs an accountant with epsilon=: no shard has a budget")
        if models is None:
            raise ValueError("spent needs a first charge: the number of shards is not known yet")
        return np.zeros(models) if self.totals.spent is None else self.totals.spent.copy()

    def limit(self) -> float:
        """Return the budget of every shard.

        Raises:
            ValueError: the shards have no budget, or its unit is not known.
        """
        if self.settings.epsilon is None:
            raise ValueError("limit needs an accountant with epsilon=: no shard has a budget")
        if self.budget is None:
            raise ValueError("limit needs a first charge: the unit of the budget is not known yet")
        return self.budget.amount

    def written(self) -> dict[str, Any]:
        """Return everything but the settings as JSON values. Private."""
        binding, budget = self.binding, self.budget
        return {
            "binding": None if binding is None else binding.written(),
            "budget": None if budget is None else write_fields(budget),
            "totals": write_totals(self.totals),
        }

    def state(self) -> dict[str, Any]:
        """Return everything as JSON values. Private."""
        return {"settings": write_fields(self.settings), "account": self.written()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Account:
        """Return the account that `state` has written.

        Raises:
            ValueError: the state is not valid.
        """
        values = check_keys("state", dict(state), {"settings", "account"})
        return Account.read(read_fields(Settings, values["settings"]), values["account"])

    @staticmethod
    def read(settings: Settings, written: Any) -> Account:
        """Return the account with these settings that the method `written` has written.

        Raises:
            ValueError: no account with these settings writes these values.
        """
        values = check_keys("account", written, {"binding", "budget", "totals"})
        account = Account(settings)
        if values["binding"] is not None:
            account = account.bound(Binding.read(values["binding"]))
        budget = None
        if values["budget"] is not None:
            budget = read_fields(ShardBudget, values["budget"])
            largest = account.binding.largest if account.binding else None
            if budget != account._budget(budget.measure, budget.order, largest):
                raise ValueError(f"budget must follow from the settings, got {budget!r}")
        if account.budget not in (None, budget):
            raise ValueError(f"budget must be {account.budget!r}, got {budget!r}")
        totals = read_totals(values["totals"], budget)
        return replace(account, budget=budget, totals=totals)
