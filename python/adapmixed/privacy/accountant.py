"""The accountant: privacy events in, an (ε, δ) guarantee in plain words out.

What is stated (proofs in docs/privacy.md), with E_i the total of shard i's realised losses and of
the costs fixed beforehand, P and Q the laws of the transcript with and without shard i:

- fixed costs only: (ε, δ)-DP.
- realised losses: P(S) <= ∫_S e^{E_i + c_α(δ)} dQ + δ and the same with P and Q exchanged, an
  ex-post statement about the removal of shard i whose exponent depends on the transcript.

Totals are upper bounds: losses are inflated by their error bound, sums are rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.conversions import c_alpha, screening_rho, zcdp_to_dp
from adapmixed.privacy.events import (
    LOSS_ABSOLUTE_ERROR,
    Event,
    GaussianScreening,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    check_real,
)
from adapmixed.privacy.guarantee import RULES, Guarantee


@dataclass
class _State:
    """Running totals. `mixing` is (N, K) upper bounds per model, or (1, 1) for rule "paper"."""

    num_models: int | None = None
    adjacency: str | None = None
    orders: tuple[float, ...] = ()
    mixing: NDArray[np.float64] | None = None
    rho: float = 0.0  # zCDP cost of screening, the same for every model and order
    queries: int = 0
    plan: tuple[int, float] | None = None  # budget and bound per query of a planned RenyiBound
    planned_queries: int = 0  # answered of them
    screened: bool = False
    bounded: bool = False
    realised: bool = False
    published: bool = False
    unprotected: bool = False


@dataclass(frozen=True)
class _Result:
    """The binding model's parts; mixing + screening + conversion <= total (rounded up, >= 0)."""

    mixing: float
    screening: float
    conversion: float
    total: float
    order: float | None


class Accountant:
    """Composes privacy events of one ensemble into a `Guarantee`.

    Args:
        delta: δ in (0, 1) of the final statement.
        rule: "per_model" charges max_i Σ_t loss; "paper" charges Σ_t max_i loss, at one order.
        order_weights: public weights w > 0, one per order of the events, that sum to at most 1;
            order α gets w_α δ (default: uniform). Fixed before the first query.

    Adding is O(size of the event), `epsilon()` O(N K) whatever the number of queries so far, so a
    running curve costs little; `copy()` is O(N K).
    """

    def __init__(
        self,
        delta: float,
        *,
        rule: str = "per_model",
        order_weights: Sequence[float] | None = None,
    ) -> None:
        self.delta = check_real("delta", delta)
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must be in (0, 1), got {delta!r}")
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
        self._state = _State()
        self._conversion: NDArray[np.float64] | None = None

    @property
    def queries(self) -> int:
        """Answered queries so far (a screening belongs to an answer and is not counted)."""
        return self._state.queries

    def copy(self) -> Accountant:
        """An independent accountant with the same totals."""
        other = Accountant(self.delta, rule=self.rule, order_weights=self.order_weights)
        other._state, other._conversion = replace(self._state), self._conversion
        return other

    def add(self, events: Event | Iterable[Event]) -> Accountant:
        """Adds one event or several; all of them or, on ValueError, none. Returns self."""
        staged = replace(self._state)  # arrays are replaced, never changed in place
        single = isinstance(events, Event) or not isinstance(events, Iterable)
        for event in [events] if single else events:  # type: ignore[union-attr]
            self._add(staged, event)
        if staged.orders != self._state.orders:
            self._conversion = self._conversion_costs(staged.orders)
        self._state = staged
        return self

    def epsilon(self) -> Guarantee:
        """The guarantee of everything added so far."""
        state, kind = self._state, self._kind()
        make = partial(Guarantee, kind=kind, unit="shard", queries=state.queries)
        if kind == "none":
            return make(epsilon=None, delta=1.0, adjacency=None, rule=None, order=None)
        if kind == "public":
            return make(epsilon=0.0, delta=0.0, adjacency=None, rule=None, order=None)
        result = self._evaluate()
        return make(
            epsilon=result.total,
            delta=self.delta,
            adjacency=state.adjacency or "zero_out",
            rule=self.rule,
            order=result.order,
            orders=state.orders,
            # A cost outside the plan grows with the number of queries.
            budget=state.plan[0] if state.plan and not (state.bounded or state.screened) else None,
        )

    def breakdown(self) -> dict[str, float]:
        """The binding model's "mixing", "screening", "conversion" and "total" (Table 2b).

        "total" equals `epsilon().epsilon`; with unprotected answers "mixing" and "total" are inf.
        """
        kind = self._kind()
        if kind in ("none", "public"):
            cost = math.inf if kind == "none" else 0.0
            return {"mixing": cost, "screening": 0.0, "conversion": 0.0, "total": cost}
        result = self._evaluate()
        return {
            "mixing": result.mixing,
            "screening": result.screening,
            "conversion": result.conversion,
            "total": result.total,
        }

    def _kind(self) -> str:
        state = self._state
        if state.unprotected:
            return "none"
        if state.published:
            return "published"
        if state.realised:
            return "data-dependent, ex-post"
        return "fixed" if state.bounded or state.screened or state.plan else "public"

    def _add(self, state: _State, event: object) -> None:
        if isinstance(event, PublicAnswer | UnprotectedAnswer):
            state.queries += event.queries
            if isinstance(event, UnprotectedAnswer) and event.queries:
                state.unprotected = True
            return
        if not isinstance(event, GaussianScreening | LeaveOneOutLoss | RenyiBound):
            raise ValueError(f"events must be privacy events, got {type(event).__name__}")
        _agree(state, "num_models", event.num_models)
        if isinstance(event, GaussianScreening):
            if event.queries:
                rho = screening_rho(event.weight, event.sigma, event.num_models)
                state.rho = _add_up(state.rho, _times_up(event.queries, rho))
                state.screened = True
            return
        _agree(state, "adjacency", event.adjacency)
        orders = event.orders if isinstance(event, LeaveOneOutLoss) else (event.order,)
        self._check_orders(state, orders)
        # An event without queries still declares the mechanism: its orders stay fixed even if
        # every answer turns out to be public, since an order chosen by the outcome is not valid.
        state.queries += event.queries
        if isinstance(event, RenyiBound):
            amount = np.full((1, 1), _times_up(_charged(state, event), event.epsilon))
            state.bounded |= event.budget is None
            state.published |= event.published
        else:
            amount = _event_totals(event, self.rule)
            state.realised = True
        rows = 1 if self.rule == "paper" else event.num_models
        before = np.zeros((rows, len(orders))) if state.mixing is None else state.mixing
        state.mixing = _array_add_up(before, amount)

    def _check_orders(self, state: _State, orders: tuple[float, ...]) -> None:
        if self.rule == "paper" and len(orders) > 1:
            raise ValueError(f"rule 'paper' allows one order, got orders {orders!r}")
        if self.order_weights is not None and len(self.order_weights) != len(orders):
            raise ValueError(
                f"order_weights must have one weight per order, got {len(self.order_weights)} "
                f"weights for orders {orders!r}"
            )
        if not state.orders:
            state.orders = orders
        elif state.orders != orders:
            raise ValueError(
                f"orders must be the same in every event, got {orders!r} after {state.orders!r}"
            )

    def _conversion_costs(self, orders: tuple[float, ...]) -> NDArray[np.float64]:
        """c_α(w_α δ) for every order; shares of δ are rounded down, so they sum to at most δ."""
        if len(orders) == 1 and self.order_weights is None:
            return np.array([c_alpha(orders[0], self.delta)])
        uniform = math.nextafter(1 / len(orders), 0.0)
        weights = self.order_weights or (uniform,) * len(orders)
        shares = [
            self.delta if weight == 1 else math.nextafter(weight * self.delta, 0.0)
            for weight in weights
        ]
        return np.array(list(map(c_alpha, orders, shares)))

    def _evaluate(self) -> _Result:
        """max over models of min over orders of E_{i,α} + c_α(w_α δ)."""
        state = self._state
        if state.mixing is None or self._conversion is None:
            return self._evaluate_screening()
        # Screening costs order times rho at every order.
        screening = np.array([_times_up(order, state.rho) for order in state.orders])
        spent = _array_add_up(state.mixing, screening)
        totals = _array_add_up(spent, self._conversion)
        model = int(totals.min(axis=1).argmax())
        column = int(totals[model].argmin())
        return _Result(
            mixing=float(state.mixing[model, column]),
            screening=float(screening[column]),
            conversion=float(self._conversion[column]),
            total=max(0.0, float(totals[model, column])),
            order=state.orders[column],
        )

    def _evaluate_screening(self) -> _Result:
        """Screening alone: rho is public, so the best order is known beforehand."""
        rho = self._state.rho
        total, order = zcdp_to_dp(rho, self.delta)
        if math.isinf(order):
            return _Result(0.0, 0.0, 0.0, total, None)
        screening, conversion = _times_up(order, rho), c_alpha(order, self.delta)
        return _Result(0.0, screening, conversion, total, order)


def _event_totals(event: LeaveOneOutLoss, rule: str) -> NDArray[np.float64]:
    """Σ_t of the inflated losses, rounded up: (N, K), or (1, 1) after max_i for rule "paper"."""
    with np.errstate(over="ignore"):  # overflow to inf is the safe direction
        inflated = event.loss * (1 + event.loss_error) + LOSS_ABSOLUTE_ERROR
        loss = np.where(event.loss > 0, inflated, 0.0)
        if rule == "paper":
            loss = loss.max(axis=0, keepdims=True)
        # Any order of summation of B terms >= 0 errs by at most B units of 2^-53, relatively.
        slack = 1 + (event.queries + 8) * 2.0**-52
        return np.asarray(loss.sum(axis=1) * slack, dtype=np.float64)


def _charged(state: _State, event: RenyiBound) -> int:
    """How many queries this event pays for: with a budget, all of it at once and nothing later."""
    if event.budget is None:
        return event.queries
    plan = (event.budget, event.epsilon)
    first = state.plan is None
    if not first and state.plan != plan:
        raise ValueError(
            f"budget and epsilon must be the same in every event, got {plan!r} after {state.plan!r}"
        )
    answered = state.planned_queries + event.queries
    if answered > event.budget:
        raise ValueError(
            f"queries must stay within the budget of {event.budget} that the guarantee was planned "
            f"for, got {answered}"
        )
    state.plan, state.planned_queries = plan, answered
    return event.budget if first else 0


def _agree(state: _State, name: str, value: int | str) -> None:
    known = getattr(state, name)
    if known is None:
        setattr(state, name, value)
    elif known != value:
        raise ValueError(f"{name} must be the same in every event, got {value!r} after {known!r}")


def _array_add_up(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a + b rounded up; exact where one term is 0."""
    with np.errstate(over="ignore"):
        total = a + b
    exact = (a == 0) | (b == 0)
    return np.asarray(np.where(exact, total, np.nextafter(total, np.inf)), dtype=np.float64)


def _add_up(a: float, b: float) -> float:
    return a + b if 0 in (a, b) else math.nextafter(a + b, math.inf)


def _times_up(count: float, cost: float) -> float:
    if cost == 0 or count == 0:
        return 0.0
    return cost if count == 1 else math.nextafter(count * cost, math.inf)
