"""How the methods of an experiment are drawn: by kind of guarantee, neighbours and unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adapmixed_lab.figures.style import MARKERS, filling, format_promise

LEGEND = (
    "Circles are fixed guarantees, diamonds data-dependent, ex-post values, crosses claims of the "
    "published bound, which is invalid. Full marks are for zero-out, empty ones for add/remove: "
    "the same ε is not the same promise."
)

Row = Mapping[str, Any]


def look(one: Row) -> dict[str, Any]:
    """Return the style of a method's mark, ours and the paper's alike."""
    kind, neighbours, _ = _facts(one)
    return {"marker": MARKERS.get(kind, "s"), **filling(neighbours)}


def promise(one: Row) -> str:
    """Return the kind and neighbours of a method's ε, and the unit if it is no shard."""
    kind, neighbours, unit = _facts(one)
    if kind == "none":
        return "no guarantee"
    words = format_promise(kind, neighbours)
    return words if unit in (None, "shard") else f"{words} of one {unit}"


def _facts(one: Row) -> tuple[str, str | None, str | None]:
    """Return kind, neighbours and unit of our line, else of the paper's."""
    side = one["ours"] or one["paper"]
    # A line that is the paper's alone says no neighbours; its published bound is for these.
    neighbours = "add_remove" if side["kind"] == "published" else side.get("adjacency")
    return side["kind"], neighbours, side.get("unit")
