"""The accountant: privacy events in, an (ε, δ) guarantee in plain words out.

What is stated (proofs in docs/privacy.md), with E_i the total of shard i's realised losses and of
the costs fixed beforehand, P and Q the laws of the transcript with and without shard i:

- fixed costs only: (ε, δ)-DP.
- realised losses: P(S) <= ∫_S e^{E_i + c_α(δ)} dQ + δ and the same with P and Q exchanged, an
  ex-post statement about the removal of shard i whose exponent depends on the transcript.

Totals are upper bounds: losses are inflated by their error bound, sums are rounded up. There is one
file a kind of total: `renyi_total`, `fixed_totals`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.checks import check_delta, check_question, check_real
from adapmixed.privacy.events import CAVEATS, Event, IndividualCharge
from adapmixed.privacy.filter import PerModelFilter
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.fixed_totals import ClippedTotal, PoolTotal, Result
from adapmixed.privacy.guarantee import RULES, Guarantee
from adapmixed.privacy.released_count import ReleasedCount
from adapmixed.privacy.renyi_total import RenyiTotal
from adapmixed.privacy.running import Running, add_event, kind_of
from adapmixed.privacy.state import read_accountant, write_accountant


class Accountant:
    """Composes privacy events of one ensemble into a `Guarantee`.

    Args:
        delta: δ in (0, 1) of the final statement.
        rule: "per_model" charges max_i Σ_t loss; "paper" charges Σ_t max_i loss, at one order.
        order_weights: public weights w > 0, one per order of the events, that sum to at most 1;
            order α gets w_α δ (default: uniform). Fixed before the first query.
        adjacency: which neighbours are asked about: "zero_out", "add_remove" or "replace_one".
            None: those of the events, "zero_out" for events that cover every kind.
        filter_budget: that of the filter whose `IndividualCharge`s are added; its δ is `delta`.

    Adding is O(size of the event), `epsilon()` O(N K) whatever the number of queries so far, so a
    running curve costs little (ClippedMixing: a second for the first, whose value is kept);
    `copy()` is O(1).
    """

    def __init__(
        self,
        delta: float,
        *,
        rule: str = "per_model",
        order_weights: Sequence[float] | None = None,
        adjacency: str | None = None,
        filter_budget: FilterBudget | None = None,
    ) -> None:
        self.delta = check_delta(delta)
        if rule not in RULES:
            raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
        self.rule = rule
        self.order_weights: tuple[float, ...] | None = None
        if order_weights is not None:
            weights = tuple(check_real("order_weights", weight) for weight in order_weights)
            if not weights or min(weights) == 0 or math.fsum(weights) > 1:
                raise ValueError(
                    f"order_weights must be > 0 and sum to at most 1, got {order_weights!r}"
                )
            self.order_weights = weights
        self.adjacency = None if adjacency is None else check_question(adjacency)
        if filter_budget is not None and filter_budget.delta != self.delta:
            raise ValueError(
                f"delta must be the filter's, {filter_budget.delta!r}, got {self.delta!r}"
            )
        self.filter_budget = filter_budget
        self._state = Running()
        self._lock = threading.Lock()
        self._follows = False

    @property
    def queries(self) -> int:
        """Answered queries so far (a screening belongs to an answer and is not counted)."""
        return self._state.queries

    @property
    def planned_queries(self) -> int:
        """Answered queries so far of a budget that was charged with the first of them; else 0."""
        total = self._state.total
        return 0 if total is None or isinstance(total, FilterTotal) else total.planned_queries

    @property
    def individual_spent(self) -> NDArray[np.float64] | None:
        """(N,) float64, what each model has been charged under the filter, and what its budget
        reserves for counts; None before an answer.

        Private: for the operator, and for a `PerModelFilter` that goes on where one has stopped.
        """
        total = self._state.total
        return total.spent if isinstance(total, FilterTotal) else None

    @property
    def released_counts(self) -> tuple[ReleasedCount, ...]:
        """The noisy counts that were added here, in their order: public. A ledger's accountant has
        all of its filter's; beside none, those of a filter in memory are no events."""
        total = self._state.total
        return total.counts if isinstance(total, FilterTotal) else ()

    def copy(self) -> Accountant:
        """An independent accountant with the same totals."""
        other = Accountant(**self._settings())
        other._state, other._follows = replace(self._state), self._follows
        return other

    def state(self) -> dict[str, Any]:
        """Everything added so far as strict JSON values, exact to the bit: see `from_state`.

        Private where losses are: it holds what each model has been charged.

        Raises:
            ValueError: another process is charged (`follow`): these are not the totals.
        """
        self._check_leads()
        return write_accountant(self._settings(), self._state)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Accountant:
        """The accountant that `state()` was asked of; it goes on as that one would have.

        Raises:
            ValueError: another format version, a field that is missing, unknown or of another type,
                or totals that no events can have given.
        """
        settings, running = read_accountant(state)
        accountant = cls(**settings)
        accountant._state = running
        return accountant

    def _settings(self) -> dict[str, Any]:
        names = ("delta", "rule", "order_weights", "adjacency", "filter_budget")
        return {name: getattr(self, name) for name in names}

    def add(self, events: Event | Iterable[Event]) -> Accountant:
        """Adds one event or several; all of them or, on ValueError, none. Returns self.

        All private answers must come from one mechanism: realised losses and Rényi bounds,
        `ClippedAnswer`s, or `BoundedRangeAnswer`s, each with or without noisy screening; or
        `IndividualCharge`s of a filter that was attached (`attach`).
        """
        return self._extend(events, attached=True)

    def replay(self, events: Event | Iterable[Event]) -> Accountant:
        """As `add`, of what was charged before and is read again: no filter is asked for."""
        return self._extend(events, attached=False)

    def _extend(self, events: Event | Iterable[Event], *, attached: bool) -> Accountant:
        single = isinstance(events, Event) or not isinstance(events, Iterable)
        with self._lock:  # threads may share an accountant
            before, settings = self._state, self._settings()
            staged = replace(before)
            for event in [events] if single else events:  # type: ignore[union-attr]
                if attached and isinstance(event, IndividualCharge | ReleasedCount):
                    self._check_attached(before)
                add_event(staged, event, **settings)
            if isinstance(staged.total, ClippedTotal):
                answered = before.total.answered if isinstance(before.total, ClippedTotal) else 0
                staged.total.check_screening(
                    staged.screening, 0 if before.screening.screened else answered
                )
            self._state = staged
        return self

    def _check_attached(self, state: Running) -> None:
        if self.filter_budget is not None and state.filter is None:
            raise ValueError(
                "model_filter must be attached before its first IndividualCharge, by attach("
                "model_filter) of the accountant, or of the ledger where that is charged: only "
                "then is it known to hold what its models have spent, and its noisy counts to be "
                "paid for"
            )

    def follow(self) -> None:
        """Says that another process is charged: from here on no guarantee can be asked for here."""
        self._follows = True

    def _check_leads(self) -> None:
        if self._follows:
            raise ValueError("the guarantee must be asked of the rank that leads: it was charged")

    def attach(
        self,
        model_filter: PerModelFilter,
        *,
        record: Callable[[ReleasedCount], object] | None = None,
    ) -> None:
        """Says which filter's charges come next; needed before the first of them.

        From then on the filter holds at least what its models were charged here.

        Args:
            record: for `Ledger.attach` alone: adds each noisy count of the filter here before it
                is known, so that other filters may go on with the counts that are left. Nothing
                here checks that it does.

        Raises:
            ValueError: a filter of another budget; one that does not hold what the models were
                charged here before it; one that has released counts with seeded noise; or, where
                the budget reserves noisy counts, a second one: how many were released its filter
                alone knows. With `record`, one that has released counts which are not here.
        """
        if self.filter_budget != model_filter.budget:
            raise ValueError(
                f"model_filter must have the accountant's budget, {self.filter_budget}, got "
                f"{model_filter.budget}"
            )
        with self._lock:
            state = self._state
            total = state.total
            held = total if isinstance(total, FilterTotal) else None
            spent = None if held is None else held.spent
            reserved = model_filter.budget.reserved
            charged = np.full(model_filter.num_models, reserved) if spent is None else spent
            same = state.filter == model_filter.identity
            released = 0 if held is None else len(held.counts)
            used = state.filter is not None or released > 0 or bool((charged > reserved).any())
            if record is None and model_filter.budget.releases and used and not same:
                raise ValueError(
                    "model_filter must be the only one of its accountant where noisy counts are "
                    "released: how many were, that filter alone knows (a ledger would)"
                )
            model_filter.serve(charged, state.queries - state.public_queries, released, record)
            self._state = replace(state, filter=model_filter.identity)

    def epsilon(self, adjacency: str | None = None) -> Guarantee:
        """The guarantee of everything added so far.

        What each kind means and where it is proved: docs/privacy.md, section 1; realised losses
        section 4, several orders section 5, ClippedMixing 11, ClippedLogPool 12, a filter 13.

        Args:
            adjacency: which neighbours are asked about; None: as the accountant was made.

        Raises:
            ValueError: realised losses or Rényi bounds were added, which hold for one kind of
                neighbours, and another is asked about.
        """
        state, kind = self._state, self._kind()
        make = partial(Guarantee, kind=kind, unit="shard", queries=state.queries)
        make = partial(make, public_queries=state.public_queries)
        asked = self._asked(adjacency)
        if kind == "none":
            return make(epsilon=None, delta=1.0, adjacency=None, rule=None, order=None)
        if kind == "public":
            return make(epsilon=0.0, delta=0.0, adjacency=None, rule=None, order=None)
        make = partial(make, caveats=tuple(name for name in CAVEATS if name in state.caveats))
        result, total = self._evaluate(asked), state.total
        make = partial(make, result.total, self.delta, adjacency=asked, order=result.order)
        if isinstance(total, ClippedTotal):
            return make(rule=None, budget=total.budget, method="pld")
        if isinstance(total, FilterTotal):
            return make(rule=None, method="filter")
        screened = state.screening.screened > 0
        if isinstance(total, PoolTotal):
            # A cost outside the plan grows with the number of queries.
            constant = asked == "add_remove" and total.constant_models is True
            make = partial(make, constant_models=constant)
            return make(rule=None, budget=None if screened else total.budget, method="zcdp")
        if total is None:
            return make(rule=self.rule)
        budget = None if screened else total.budget
        return make(rule=self.rule, orders=total.orders, budget=budget)

    def breakdown(self, adjacency: str | None = None) -> dict[str, float]:
        """The binding model's "mixing", "screening", "conversion" and "total" (Table 2b).

        "total" equals `epsilon(adjacency).epsilon`; with unprotected answers "mixing" and "total"
        are inf. For ClippedMixing "screening" is what it adds, and nothing is converted
        (docs/privacy.md, sections 5, 7, 11 and 12).
        """
        kind, asked = self._kind(), self._asked(adjacency)
        if kind in ("none", "public"):
            cost = math.inf if kind == "none" else 0.0
            return {"mixing": cost, "screening": 0.0, "conversion": 0.0, "total": cost}
        result = self._evaluate(asked)
        return {
            "mixing": result.mixing,
            "screening": result.screening,
            "conversion": result.conversion,
            "total": result.total,
        }

    def _kind(self) -> str:
        self._check_leads()
        return kind_of(self._state)

    def _asked(self, adjacency: str | None) -> str:
        asked = self.adjacency if adjacency is None else check_question(adjacency)
        known = self._state.adjacency
        if asked is not None and known is not None and asked != known:
            raise ValueError(
                f"adjacency must be {known!r}, what the events hold for, got {asked!r}"
            )
        return known or asked or "zero_out"

    def _evaluate(self, adjacency: str) -> Result:
        state = self._state
        if state.total is None:
            return state.screening.evaluate(self.delta)
        if isinstance(state.total, RenyiTotal):
            return state.total.evaluate(state.screening.rho)
        if isinstance(state.total, FilterTotal):
            return state.total.evaluate(adjacency)
        return state.total.evaluate(self.delta, adjacency, state.screening)
