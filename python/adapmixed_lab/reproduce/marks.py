"""The marks of an experiment's methods, by kind of guarantee, neighbours and unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapmixed.report.view import format_promise
from adapmixed_lab.figures.style import MARKERS, filling
from adapmixed_lab.reproduce.result import relation

LEGEND = (
    "Circles are fixed guarantees, diamonds are data-dependent, ex-post values, and crosses are "
    "claims of the published bound, which is invalid. Full marks are for zero-out, and empty marks "
    "for leave-one-out or, of DP-SGD, add/remove. The same ε in another shape or filling is not "
    "the same guarantee."
)

Row = Mapping[str, Any]


def look(one: Row) -> dict[str, Any]:
    """Return the style of a method's mark, which ours and the paper's share."""
    kind, neighbours, _ = _facts(one)
    return {"marker": MARKERS.get(kind, "s"), **filling(neighbours)}


def promise(one: Row) -> str:
    """Return the kind and neighbours of a method's ε, and the unit unless it is a shard."""
    kind, neighbours, unit = _facts(one)
    if kind == "none":
        return "no guarantee"
    words = format_promise(kind, neighbours)
    return words if unit in (None, "shard") else f"{words} of one {unit}"


def _facts(one: Row) -> tuple[str, str | None, str | None]:
    """Return kind, neighbours and unit of our line, or of the paper's if ours is missing."""
    side = one["ours"] or one["paper"]
    # A line of the paper alone names no neighbours; the published bound is for leave-one-out.
    neighbours = "add_remove" if side["kind"] == "published" else relation(side)
    return side["kind"], neighbours, side.get("unit")
