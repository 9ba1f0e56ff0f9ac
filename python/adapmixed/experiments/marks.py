"""How the methods of an experiment are drawn: by kind of guarantee, neighbours and unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from adapmixed.report.style import FILLS, MARKERS
from adapmixed.report.view import format_promise

LEGEND = (
    "Circles are fixed guarantees, diamonds data-dependent, ex-post values, crosses claims of the "
    "published bound, which is invalid. Full marks are for zero-out, empty ones for add/remove: "
    "the same ε is not the same promise."
)

Row = Mapping[str, Any]
Bar = tuple[float, float, float]
"""ε, and the least and the largest perplexity that are drawn there."""


def look(one: Row) -> dict[str, Any]:
    """Of a method's mark, ours and the paper's alike."""
    kind, neighbours, _ = _facts(one)
    fill = FILLS.get(neighbours or "", "full")
    found: dict[str, Any] = {"marker": MARKERS.get(kind, "s")}
    # White inside, so that no line shows through.
    return found | ({"markerfacecolor": "white"} if fill == "none" else {"fillstyle": fill})


def promise(one: Row) -> str:
    """Kind and neighbours of a method's ε, and the unit where it is no shard."""
    kind, neighbours, unit = _facts(one)
    if kind == "none":
        return "no guarantee"
    words = format_promise(kind, neighbours)
    return words if unit in (None, "shard") else f"{words} of one {unit}"


def side_by_side(axes: Any, bars: Sequence[Bar], size: float) -> list[float]:
    """Where to draw marks, and their bars, so that none covers another: in ε, as given or near.

    Those that would lie on one another stand around their middle, in their order.

    Args:
        axes: of a settled figure, with their limits.
        bars: one for each mark.
        size: of a mark, in points.
    """
    width = 1.2 * size * axes.figure.dpi / 72
    ends = [[axes.transData.transform((x, y)) for y in (low, high)] for x, low, high in bars]
    places = [float(low[0]) for low, _ in ends]
    groups = [[index] for index in range(len(bars))]

    def touch(one: int, other: int) -> bool:
        (_, low), (_, high) = ends[one]
        (_, least), (_, most) = ends[other]
        beside = abs(places[one] - places[other]) >= 0.99 * width
        return not beside and low - width < most and least - width < high

    def touching() -> tuple[int, int] | None:
        pairs = combinations(range(len(groups)), 2)
        return next(
            (p for p in pairs if any(touch(i, j) for i in groups[p[0]] for j in groups[p[1]])), None
        )

    while (pair := touching()) is not None:
        first, second = pair
        groups[first] += groups.pop(second)
        groups[first].sort(key=lambda index: (ends[index][0][0], index))
        middle = math.fsum(ends[index][0][0] for index in groups[first]) / len(groups[first])
        for rank, index in enumerate(groups[first]):
            places[index] = middle + (rank - (len(groups[first]) - 1) / 2) * width
    back = axes.transData.inverted()
    return [float(back.transform((x, low[1]))[0]) for x, (low, _) in zip(places, ends, strict=True)]


def _facts(one: Row) -> tuple[str, str | None, str | None]:
    """Kind, neighbours and unit of ours, else of the paper's line."""
    side = one["ours"] or one["paper"]
    # A line that is the paper's alone says no neighbours; its published bound is for these.
    neighbours = "add_remove" if side["kind"] == "published" else side.get("adjacency")
    return side["kind"], neighbours, side.get("unit")
