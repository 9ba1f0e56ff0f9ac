"""The running totals of an accountant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.fixed_totals import ClippedTotal, PoolTotal, ScreeningTotal
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
    releases: int = 0  # noisy counts that it may release


_Total = TypeVar("_Total", RenyiTotal, ClippedTotal, PoolTotal, FilterTotal)


def one_mechanism(state: Running, empty: _Total) -> _Total:
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


def agree(state: Running, name: str, value: int | str) -> None:
    """Sets what every event must agree on, or raises ValueError where they do not."""
    known = getattr(state, name)
    if known is None:
        setattr(state, name, value)
    elif known != value:
        raise ValueError(f"{name} must be the same in every event, got {value!r} after {known!r}")
