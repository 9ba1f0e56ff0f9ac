"""An accountant as a JSON value that gives it back to the bit, however its events have come.

Checked on reading is what no events can give; that a state is the one that was written is for the
file around it to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.checks import ADJACENCIES
from adapmixed.privacy.event_fields import FIELDS
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
    read_real,
    read_state,
    record,
    write_real,
    write_state,
)
from adapmixed.privacy.filter_budget import BUDGET
from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.fixed_totals import ClippedTotal, PoolTotal, ScreeningTotal
from adapmixed.privacy.renyi_total import RenyiTotal
from adapmixed.privacy.running import Running

FORMAT_VERSION = 1
"""Of a state; rises when its fields or their meaning change."""


def _read_plan(written: Any) -> tuple[int, float]:
    budget, epsilon = exactly(list, written)
    return exactly(int, budget), read_real(epsilon)


def _read_caveats(written: Any) -> frozenset[str]:
    names = exactly(list, written)
    if not set(names) <= set(CAVEATS) or len(set(names)) < len(names):
        raise ValueError(f"must be of {CAVEATS}, got {names!r}")
    return frozenset(names)


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
        "replaced": REAL,
        "plan": optional(record(BoundedRangeAnswer, FIELDS[BoundedRangeAnswer])),
        "answered": COUNT,
        "unplanned": FLAG,
    },
    FilterTotal: {"budget": BUDGET, "spent": ARRAY},
}
"""The fields of every total. A new one needs its line, and its checks in `_check_total`."""

_NAMED = {kind.__name__: record(kind, fields) for kind, fields in TOTALS.items()}


def _write_total(total: Any, arrays: Arrays) -> dict[str, Any]:
    name = type(total).__name__
    return {"kind": name, "fields": _NAMED[name].write(total, arrays)}


def _read_total(written: Any, arrays: Arrays) -> Any:
    name = exactly(dict, written).get("kind")
    if set(written) != {"kind", "fields"} or name not in _NAMED:
        raise ValueError(f"must be one of {', '.join(_NAMED)}, got {name!r}")
    return _NAMED[name].read(written["fields"], arrays)


_RUNNING: dict[str, Kind] = {
    "screening": record(ScreeningTotal, {"rho": REAL, "screened": COUNT, "single": optional(REAL)}),
    "total": optional(Kind(_write_total, _read_total)),
    "num_models": optional(COUNT),
    "adjacency": optional(WORD),
    "queries": COUNT,
    "public_queries": COUNT,
    "unprotected": FLAG,
    "caveats": _NAMES,
    "filter": optional(WORD),
    "releases": COUNT,
}
_SETTINGS: dict[str, Kind] = {
    "delta": REAL,
    "rule": WORD,
    "order_weights": optional(REALS),
    "adjacency": optional(WORD),
    "filter_budget": optional(BUDGET),
}


def write_accountant(settings: Mapping[str, Any], running: Running) -> dict[str, Any]:
    """Arguments and running totals of an accountant."""
    fields = _SETTINGS | {"running": record(Running, _RUNNING)}
    return write_state("accountant", FORMAT_VERSION, fields, {**settings, "running": running})


def read_accountant(state: Mapping[str, Any]) -> tuple[dict[str, Any], Running]:
    """(arguments, running totals); ValueError where no accountant has that state."""
    fields = _SETTINGS | {"running": record(Running, _RUNNING)}
    settings = read_state("accountant", FORMAT_VERSION, fields, state)
    running: Running = settings.pop("running")
    _check_running(running)
    _check_total(running, settings)
    return settings, running


def _check_running(running: Running) -> None:
    screening = running.screening
    counts = (running.queries, running.public_queries, screening.screened, running.releases)
    _require(min(counts) >= 0, "counts must be >= 0")
    _require(running.public_queries <= running.queries, "public_queries must be <= queries")
    _require(screening.rho >= 0 and (screening.single or 0.0) >= 0, "screening.rho must be >= 0")
    _require(
        running.adjacency in (None, *ADJACENCIES), f"adjacency must be one of {ADJACENCIES} or null"
    )
    used = running.total is not None or screening.screened > 0
    known = running.num_models
    _require(known is None or known >= 1, "num_models must be >= 1")
    _require(known is not None or not used, "num_models must be given beside private answers")


def _check_total(running: Running, settings: Mapping[str, Any]) -> None:
    total, models = running.total, running.num_models or 0
    if isinstance(total, RenyiTotal):
        mine = (total.delta, total.rule, total.order_weights)
        asked = tuple(settings[name] for name in ("delta", "rule", "order_weights"))
        _require(mine == asked, "delta, rule and order_weights must be the accountant's")
        rows, columns = (1 if total.rule == "paper" else models), len(total.orders)
        _require(columns > 0 and min(total.orders) > 1, "orders must be > 1")
        _require(running.adjacency is not None, "adjacency must be given beside Rényi events")
        _amounts("mixing", total.mixing, (rows, columns))
        shape = None if total.conversion is None else total.conversion.shape
        _require(shape == (columns,), f"conversion must have shape {(columns,)}, got {shape}")
        _require(bool(np.isfinite(total.conversion).all()), "conversion must be finite")  # type: ignore[arg-type]
        allowed = 0 if total.plan is None else total.plan[0]
        _require(0 <= total.planned_queries <= allowed, "planned_queries must be within the budget")
    elif isinstance(total, ClippedTotal):
        setting = total.setting
        _require(setting is not None and setting.budget is not None, "setting must have a budget")
        assert setting is not None and setting.budget is not None
        _require(setting.num_models == models, "num_models must be the same throughout")
        _require(0 <= total.answered <= setting.budget, "answered must be within the budget")
    elif isinstance(total, PoolTotal):
        _require(min(total.rho, total.replaced) >= 0, "rho must be >= 0")
        plan = total.plan
        _require(plan is None or plan.num_models == models, "num_models must be the same")
        allowed = 0 if plan is None or plan.budget is None else plan.budget
        _require(0 <= total.answered <= allowed, "answered must be within the budget")
    elif isinstance(total, FilterTotal):
        _require(total.budget == settings["filter_budget"], "budget must be the accountant's")
        _amounts("spent", total.spent, (models,), most=total.budget.amount)


def _amounts(
    name: str, values: NDArray[np.float64] | None, shape: tuple[int, ...], most: float = np.inf
) -> None:
    """Charges of that shape in [0, most], +inf allowed, NaN not."""
    found = None if values is None else values.shape
    _require(found == shape, f"{name} must have shape {shape}, got {found}")
    assert values is not None
    inside = bool(((values >= 0) & (values <= most)).all())
    _require(inside, f"{name} must be in [0, {most!r}] and not NaN in every entry")


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise ValueError(f"accountant: {words}")
