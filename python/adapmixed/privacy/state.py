"""An accountant as a JSON value that gives it back to the bit, however its events have come.

Checked on reading is what no events can give; that a state is the one that was written is for the
file around it to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from adapmixed.privacy.event_fields import FIELDS, VERSION, fields_of
from adapmixed.privacy.events import CAVEATS, BoundedRangeAnswer, ClippedAnswer
from adapmixed.privacy.fields import (
    ARRAY,
    COUNT,
    FLAG,
    REAL,
    REALS,
    WORD,
    Arrays,
    Kind,
    exactly,
    optional,
    read_fields,
    read_real,
    read_state,
    record,
    write_real,
    write_state,
)
from adapmixed.privacy.filter_budget import BUDGET, PLAIN_BUDGET
from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.fixed_totals import ClippedTotal, PoolTotal, ScreeningTotal
from adapmixed.privacy.released_count import ReleasedCount
from adapmixed.privacy.renyi_total import RenyiTotal
from adapmixed.privacy.running import Running
from adapmixed.privacy.state_checks import check_running

FORMAT_VERSION = VERSION
"""Of a state; rises when its fields or their meaning change, those of events among them."""


def _read_plan(written: Any) -> tuple[int, float]:
    budget, epsilon = exactly(list, written)
    return exactly(int, budget), read_real(epsilon)


def _read_caveats(written: Any) -> frozenset[str]:
    names = exactly(list, written)
    if not set(names) <= set(CAVEATS) or len(set(names)) < len(names):
        raise ValueError(f"must be of {CAVEATS}, got {names!r}")
    return frozenset(names)


def _read_counts(written: Any, arrays: Arrays) -> tuple[ReleasedCount, ...]:
    return tuple(_COUNT.read(one, arrays) for one in exactly(list, written))


_COUNT = record(ReleasedCount, FIELDS[ReleasedCount])
_COUNTS = Kind(lambda counts, to: [_COUNT.write(one, to) for one in counts], _read_counts)
_PLAN = Kind(lambda plan, _: [plan[0], write_real(plan[1])], lambda written, _: _read_plan(written))
_NAMES = Kind(lambda names, _: sorted(names), lambda written, _: _read_caveats(written))

TOTALS: dict[type, dict[str, Kind]] = {
    RenyiTotal: {
        "delta": REAL,
        "rule": WORD,
        "order_weights": optional(REALS),
        "orders": REALS,
        "mixing": ARRAY,
        "conversion": ARRAY,
        "plan": optional(_PLAN),
        "planned_queries": COUNT,
        "bounded": FLAG,
        "realised": FLAG,
        "published": FLAG,
    },
    ClippedTotal: {"setting": record(ClippedAnswer, FIELDS[ClippedAnswer]), "answered": COUNT},
    PoolTotal: {
        "rho": REAL,
        "removed": REAL,
        "replaced": REAL,
        "plan": optional(record(BoundedRangeAnswer, FIELDS[BoundedRangeAnswer])),
        "answered": COUNT,
        "unplanned": FLAG,
        "constant_models": optional(FLAG),
    },
    FilterTotal: {"budget": BUDGET, "spent": ARRAY, "counts": _COUNTS},
}
"""The fields of every total. A new one needs its line, and its checks in `state_checks`."""

_NAMED = {kind.__name__: record(kind, fields) for kind, fields in TOTALS.items()}


def _pool_of_version_1() -> Kind:
    """Before N could be a public constant: add/remove cost what replace-one did, of a plan at least
    what it costs now."""
    fields = dict(TOTALS[PoolTotal])
    del fields["removed"], fields["constant_models"]
    fields["plan"] = optional(record(BoundedRangeAnswer, fields_of(BoundedRangeAnswer, 1)))
    older = record(PoolTotal, fields)

    def read(written: Any, arrays: Arrays) -> PoolTotal:
        total: PoolTotal = older.read(written, arrays)
        planned = 0.0
        if total.plan is not None:
            planned = PoolTotal().add(total.plan).removed
        removed = max(total.replaced, planned)
        return replace(total, removed=removed, constant_models=False)

    return Kind(older.write, read)


def _total_of(version: int) -> Kind:
    named = dict(_NAMED)
    if version == 1:
        named["PoolTotal"] = _pool_of_version_1()
    if version < 3:
        named["FilterTotal"] = record(FilterTotal, {"budget": PLAIN_BUDGET, "spent": ARRAY})

    def write(total: Any, arrays: Arrays) -> dict[str, Any]:
        name = type(total).__name__
        return {"kind": name, "fields": named[name].write(total, arrays)}

    def read(written: Any, arrays: Arrays) -> Any:
        name = exactly(dict, written).get("kind")
        if set(written) != {"kind", "fields"} or name not in named:
            raise ValueError(f"must be one of {', '.join(named)}, got {name!r}")
        return named[name].read(written["fields"], arrays)

    return Kind(write, read)


_RUNNING: dict[str, Kind] = {
    "screening": record(ScreeningTotal, {"rho": REAL, "screened": COUNT, "single": optional(REAL)}),
    "num_models": optional(COUNT),
    "adjacency": optional(WORD),
    "queries": COUNT,
    "public_queries": COUNT,
    "unprotected": FLAG,
    "caveats": _NAMES,
    "filter": optional(WORD),
}
_SETTINGS: dict[str, Kind] = {
    "delta": REAL,
    "rule": WORD,
    "order_weights": optional(REALS),
    "adjacency": optional(WORD),
    "filter_budget": optional(BUDGET),
}


def _running_before_3(fields: dict[str, Kind]) -> Kind:
    """While budgets did not say what they reserve, but the running totals how many counts."""

    def read(written: Any, arrays: Arrays) -> Running:
        values = read_fields("Running", fields, exactly(dict, written), arrays)
        if values.pop("releases") != 0:
            raise ValueError(
                "releases must be 0 in a state of format 2 or 1, which does not say what noise the "
                "counts were paid for: the version that wrote it goes on from it"
            )
        return Running(**values)

    return Kind(record(Running, fields).write, read)


def _fields(version: int) -> dict[str, Kind]:
    running = {"total": optional(_total_of(version)), **_RUNNING}
    if version >= 3:
        return _SETTINGS | {"running": record(Running, running)}
    budget = {"filter_budget": optional(PLAIN_BUDGET)}
    return _SETTINGS | budget | {"running": _running_before_3(running | {"releases": COUNT})}


def write_accountant(settings: Mapping[str, Any], running: Running) -> dict[str, Any]:
    """Arguments and running totals of an accountant."""
    values = {**settings, "running": running}
    return write_state("accountant", FORMAT_VERSION, _fields(FORMAT_VERSION), values)


def read_accountant(state: Mapping[str, Any]) -> tuple[dict[str, Any], Running]:
    """(arguments, running totals); ValueError where no accountant has that state."""
    found = state.get("format_version") if isinstance(state, Mapping) else None
    version = next((older for older in range(1, FORMAT_VERSION) if found == older), FORMAT_VERSION)
    settings = read_state("accountant", version, _fields(version), state)
    running: Running = settings.pop("running")
    check_running(running, settings)
    if isinstance(running.total, RenyiTotal):
        # What another machine's logarithms gave is never taken for less than this one's.
        costs = np.maximum(running.total.conversion, running.total.conversion_costs())  # type: ignore[arg-type]
        running.total = replace(running.total, conversion=costs)
    return settings, running
