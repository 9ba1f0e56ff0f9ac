"""Events and totals as JSON values that give back every bit or raise ValueError."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from adapmixed.limits import check_count
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.encoding import (
    check_keys,
    exactly,
    read_array,
    read_fields,
    write_array,
    write_fields,
)
from adapmixed.privacy.events import (
    CAVEATS,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    checked_array,
)
from adapmixed.privacy.totals import Losses, Totals

_EVENTS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
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
}


def write_event(event: Event) -> dict[str, Any]:
    """Return an event as a JSON object with its class name under "event"."""
    if _EVENTS.get(type(event).__name__) is not type(event):
        raise ValueError(f"events must be privacy events, got {type(event).__name__}")
    return {"event": type(event).__name__, **write_fields(event)}


def read_event(written: Any) -> Event:
    """Return the event that `write_event` has written.

    Raises:
        ValueError: the event is unknown, so it cannot be charged, or a field is not valid.
    """
    given = dict(exactly(dict, written))
    name = given.pop("event", None)
    if type(name) is not str or name not in _EVENTS:
        raise ValueError(f"event must be one of {', '.join(_EVENTS)}, got {name!r}")
    event: Event = read_fields(_EVENTS[name], given)
    return event


def write_totals(totals: Totals) -> dict[str, Any]:
    """Return totals as a JSON object. It is private if it has losses or individual charges."""
    counted: Iterable[Any] = (replace(e, queries=n) for e, n in totals.counts.items())
    losses = totals.losses
    return {
        "counts": [write_event(event) for event in counted],
        "losses": None
        if losses is None
        else {
            "orders": list(losses.orders),
            "adjacency": losses.adjacency,
            "queries": losses.queries,
            "total": write_array(losses.total),
        },
        "spent": None if totals.spent is None else write_array(totals.spent),
        "charged": totals.charged,
        "caveats": [name for name in CAVEATS if name in totals.caveats],
    }


def read_totals(written: Any, budget: ShardBudget | None) -> Totals:
    """Return the totals that `write_totals` has written.

    Args:
        written: JSON object.
        budget: budget of every shard; None without budgets.

    Raises:
        ValueError: no events can give these totals.
    """
    keys = {"counts", "losses", "spent", "charged", "caveats"}
    values = check_keys("totals", written, keys)
    caveats = [Caveat(exactly(str, name)) for name in exactly(list, values["caveats"])]
    found = Totals().add([read_event(one) for one in exactly(list, values["counts"])], None)
    found = found.add(caveats, None)
    if values["losses"] is not None:
        found = replace(found, losses=_read_losses(values["losses"], found))
    charged = check_count("charged", exactly(int, values["charged"]), 0)
    if values["spent"] is None and charged != 0:
        raise ValueError(f"charged must be 0 without spent, got {charged}")
    if values["spent"] is not None:
        if budget is None:
            raise ValueError("spent must be null without a budget of every shard")
        spent = checked_array("spent", read_array(values["spent"]), (None,))
        # As an event of one position, so that the checks of events apply here, too. It is the sum
        # of many charges, so the largest of one answer is no bound of it.
        whole = IndividualCharge(budget.measure, budget.order, spent[:, None])
        found = found.add([whole], replace(budget, largest=None))
        found = replace(found, spent=spent, charged=charged)
    return found


def _read_losses(written: Any, found: Totals) -> Losses:
    values = check_keys("losses", written, {"orders", "adjacency", "queries", "total"})
    total = read_array(values["total"])
    orders = tuple(exactly(float, order) for order in exactly(list, values["orders"]))
    event = LeaveOneOutLoss(orders, total[:, None].copy(), values["adjacency"])
    checked = found.add([event], None).losses  # raises unless it fits the other events
    queries = exactly(int, values["queries"])
    if checked is None or queries < 0:
        raise ValueError(f"queries must be >= 0, got {queries}")
    array = np.array(total)
    array.setflags(write=False)
    return replace(checked, total=array, queries=queries)
