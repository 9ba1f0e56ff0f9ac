"""The running totals of an accountant: where an event goes, and what guarantee they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from adapmixed.privacy.events import (
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.fixed_totals import ClippedTotal, PoolTotal, ScreeningTotal
from adapmixed.privacy.released_count import ReleasedCount
from adapmixed.privacy.renyi_total import RenyiTotal

MECHANISMS = {
    RenyiTotal: "realised losses or Rényi bounds",
    ClippedTotal: "ClippedAnswer",
    PoolTotal: "BoundedRangeAnswer",
    FilterTotal: "IndividualCharge",
}
"""The kinds of total, and the events that each is of."""


@dataclass
class Running:
    """Running totals, each immutable; `total` is that of the one mechanism, None before it."""

    screening: ScreeningTotal = ScreeningTotal()
    total: RenyiTotal | ClippedTotal | PoolTotal | FilterTotal | None = None
    num_models: int | None = None
    adjacency: str | None = None  # that of Rényi events; the others answer every question
    queries: int = 0
    public_queries: int = 0  # of them
    unprotected: bool = False
    caveats: frozenset[str] = frozenset()
    filter: str | None = None  # the identity of the filter that charges come from


def kind_of(state: Running) -> str:
    """What everything added so far can be promised as: one of `KINDS` (guarantee.py)."""
    total = state.total
    if state.unprotected:
        return "none"
    if isinstance(total, RenyiTotal):
        if total.published:
            return "published"
        if total.realised:
            return "data-dependent, ex-post"
        fixed = total.bounded or total.plan is not None
    elif isinstance(total, ClippedTotal | FilterTotal):
        fixed = True
    else:
        fixed = total is not None and (total.unplanned or total.plan is not None)
    return "fixed" if fixed or state.screening.screened else "public"


def add_event(
    state: Running,
    event: object,
    *,
    delta: float,
    rule: str,
    order_weights: tuple[float, ...] | None,
    adjacency: str | None,
    filter_budget: FilterBudget | None,
) -> None:
    """Adds an event to the totals of an accountant with these settings.

    Raises:
        ValueError: no event, or one that has no place beside those before it.
    """
    if isinstance(event, Caveat):
        state.caveats |= {event.name}
        return
    if isinstance(event, PublicAnswer | UnprotectedAnswer):
        state.queries += event.queries
        if isinstance(event, PublicAnswer):
            state.public_queries += event.queries
        if isinstance(event, UnprotectedAnswer) and event.queries:
            state.unprotected = True
        return
    if not isinstance(
        event,
        GaussianScreening
        | LeaveOneOutLoss
        | RenyiBound
        | ClippedAnswer
        | BoundedRangeAnswer
        | IndividualCharge
        | ReleasedCount,
    ):
        raise ValueError(f"events must be privacy events, got {type(event).__name__}")
    _agree(state, "num_models", event.num_models)
    if isinstance(event, GaussianScreening):
        state.screening = state.screening.add(event)
    elif isinstance(event, ClippedAnswer):
        state.total = _one_mechanism(state, ClippedTotal()).add(event)
    elif isinstance(event, BoundedRangeAnswer):
        state.total = _one_mechanism(state, PoolTotal()).add(event)
    elif isinstance(event, IndividualCharge | ReleasedCount):
        if filter_budget is None:
            raise ValueError(
                f"filter_budget must be given to an accountant of {type(event).__name__}s: without "
                "a filter and its budget they give no guarantee"
            )
        state.total = _one_mechanism(state, FilterTotal(filter_budget)).add(event)
    else:
        if adjacency not in (None, event.adjacency):
            raise ValueError(
                f"adjacency must be {adjacency!r}, what this accountant is asked about, "
                f"got {event.adjacency!r}"
            )
        _agree(state, "adjacency", event.adjacency)
        empty = RenyiTotal(delta, rule, order_weights)
        state.total = _one_mechanism(state, empty).add(event)
    if not isinstance(event, GaussianScreening | ReleasedCount):
        state.queries += event.queries
    if isinstance(state.total, FilterTotal) and state.screening.screened:
        raise ValueError(
            "screening must be off or public under a filter, got a GaussianScreening: its cost "
            "is no part of the individual charges"
        )


_Total = TypeVar("_Total", RenyiTotal, ClippedTotal, PoolTotal, FilterTotal)


def _one_mechanism(state: Running, empty: _Total) -> _Total:
    """The state's total where it is of the type of `empty`, or `empty` before the first event."""
    if state.total is None:
        return empty
    if not isinstance(state.total, type(empty)):
        raise ValueError(
            f"events must come from one mechanism, got {MECHANISMS[type(empty)]} after "
            f"{MECHANISMS[type(state.total)]}: no joint total is proved; keep an accountant for "
            f"each, whose fixed ε and δ add"
        )
    return state.total


def _agree(state: Running, name: str, value: int | str) -> None:
    """Sets what every event must agree on, or raises ValueError where they do not."""
    known = getattr(state, name)
    if known is None:
        setattr(state, name, value)
    elif known != value:
        raise ValueError(f"{name} must be the same in every event, got {value!r} after {known!r}")
