"""What an accountant holds: settings, what it is bound to, and the totals. Immutable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.checks import check_delta, check_epsilon, check_question
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.encoding import check_keys, read_fields, write_fields
from adapmixed.privacy.epsilon import Parts, guarantee_of, parts_of
from adapmixed.privacy.events import Event, IndividualCharge
from adapmixed.privacy.events_json import read_totals, write_totals
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.totals import Totals


@dataclass(frozen=True)
class Settings:
    """What an accountant was made for.

    Attributes:
        delta: δ in (0, 1).
        epsilon: of every shard's own budget; None counts only.
        adjacency: which neighbours are asked about, "zero_out" or "replace_one".
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
    """What an accountant's charges are of. Charges of anything else have no common total.

    Attributes:
        mechanism: the mechanism's `repr`.
        num_models: N.
        measure, order: of its individual charges; None if it has none.
        ensemble: the ensemble's fingerprint; None for proposals made by hand.
    """

    mechanism: str
    num_models: int
    measure: str | None
    order: float | None
    ensemble: str | None


@dataclass(frozen=True)
class Account:
    """All that follows from the charges so far.

    Attributes:
        settings: of the accountant.
        binding: None before the first charge of a proposal, and if events were added alone.
        budget: of every shard, known with the first individual charge or the binding.
        totals: of all charges.
    """

    settings: Settings
    binding: Binding | None = None
    budget: ShardBudget | None = None
    totals: Totals = field(default_factory=Totals)

    def bound(self, binding: Binding) -> Account:
        """Return the account bound to this, or itself if it is.

        Raises:
            ValueError: it is bound to something else, or events were added to it alone.
        """
        if self.binding == binding:
            return self
        if self.binding is None and self.totals != Totals():
            raise ValueError(
                "accountant must have charged nothing before it is bound to a mechanism, got one "
                "to which events were added: proposals need an accountant of their own"
            )
        if self.binding is not None:
            names = [
                name
                for name in vars(binding)
                if getattr(binding, name) != getattr(self.binding, name)
            ]
            # A fingerprint is a digest of the private members: it stays out of messages.
            told = [name for name in names if name != "ensemble"]
            was, now = ({n: getattr(one, n) for n in told} for one in (self.binding, binding))
            differ = f"{was!r}, got {now!r}" if told else "got another ensemble"
            raise ValueError(
                f"accountant must be charged for what it is bound to, {differ}: "
                "another mechanism or ensemble, also one with a member retrained or withdrawn, "
                "needs an accountant of its own, whose ε and δ add"
            )
        return replace(self, binding=binding, budget=self._budget(binding.measure, binding.order))

    def added(self, events: Iterable[Event]) -> Account:
        """Return the account with these events, all of them or, on ValueError, none."""
        listed, budget = list(events), self.budget
        for event in listed:
            if budget is None and isinstance(event, IndividualCharge):
                budget = self._budget(event.measure, event.order)
        # Without a binding the measure of a budget is not known before the first charge.
        limit = budget
        if limit is None and self.settings.epsilon is not None:
            limit = ShardBudget("zcdp", 0.0)
        totals = self.totals.add(listed, limit)
        return replace(self, budget=budget, totals=totals)

    def _budget(self, measure: str | None, order: float | None) -> ShardBudget | None:
        epsilon, delta = self.settings.epsilon, self.settings.delta
        if epsilon is None or measure is None:
            return None
        return ShardBudget.for_epsilon(epsilon, delta, order, self.settings.adjacency)

    def guarantee(self, delta: float, adjacency: str) -> Guarantee:
        """Return the guarantee of all charges; see `guarantee_of`."""
        return guarantee_of(self.totals, delta, adjacency, self.budget)

    def parts(self) -> Parts:
        """Return the parts of ε; see `parts_of`."""
        settings = self.settings
        return parts_of(self.totals, settings.delta, settings.adjacency, self.budget)

    def fixed_epsilon(self, delta: float) -> float:
        """Return ε at this δ; raise ValueError if the total is not fixed."""
        found = self.guarantee(delta, self.settings.adjacency)
        if found.kind not in ("fixed", "public") or found.epsilon is None:
            raise ValueError(
                f"epsilon must be that of a fixed total, got one of kind {found.kind!r}: "
                "guarantee() says what can be stated"
            )
        return found.epsilon

    def spent(self) -> NDArray[np.float64]:
        """Return (N,) what each shard has spent: private. Raise ValueError if none has a budget."""
        models = self.totals.num_models
        if models is None and self.binding is not None:
            models = self.binding.num_models
        if self.settings.epsilon is None or models is None:
            raise ValueError("spent needs epsilon and a first charge: no shard has a budget")
        return np.zeros(models) if self.totals.spent is None else self.totals.spent.copy()

    def limit(self) -> float:
        """Return what each shard may spend. Raise ValueError if none has a budget."""
        if self.budget is None:
            raise ValueError("limit needs epsilon and a first charge: no shard has a budget")
        return self.budget.amount

    def written(self) -> dict[str, Any]:
        """Write everything but the settings as JSON values: private."""
        binding, budget = self.binding, self.budget
        return {
            "binding": None if binding is None else write_fields(binding),
            "budget": None if budget is None else write_fields(budget),
            "totals": write_totals(self.totals),
        }

    def state(self) -> dict[str, Any]:
        """Write everything as JSON values: private."""
        return {"settings": write_fields(self.settings), "account": self.written()}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Account:
        """Read what `state` gave.

        Raises:
            ValueError: it is no such state.
        """
        values = check_keys("state", dict(state), {"settings", "account"})
        return Account.read(read_fields(Settings, values["settings"]), values["account"])

    @staticmethod
    def read(settings: Settings, written: Any) -> Account:
        """Read what `written` gave.

        Raises:
            ValueError: it is of no account with these settings.
        """
        values = check_keys("account", written, {"binding", "budget", "totals"})
        account = Account(settings)
        if values["binding"] is not None:
            account = account.bound(read_fields(Binding, values["binding"]))
        budget = None
        if values["budget"] is not None:
            budget = read_fields(ShardBudget, values["budget"])
            if budget != account._budget(budget.measure, budget.order):
                raise ValueError(f"budget must follow from the settings, got {budget!r}")
        if account.budget not in (None, budget):
            raise ValueError(f"budget must be {account.budget!r}, got {budget!r}")
        totals = read_totals(values["totals"], budget)
        return replace(account, budget=budget, totals=totals)
