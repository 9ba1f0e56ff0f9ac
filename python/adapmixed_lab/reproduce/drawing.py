"""The figures of a result file, drawn from its content alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapmixed.report.view import KIND_LABELS, format_perplexity, format_promise
from adapmixed_lab.figures.comparison import (
    MARKS,
    Entry,
    Point,
    draw_parts,
    draw_tradeoff,
    place,
)
from adapmixed_lab.figures.style import Drawing, wrapped
from adapmixed_lab.reproduce.panels import draw_panels
from adapmixed_lab.reproduce.result import relation, run_words, show_cost

_PARTS = ("mixing", "screening", "conversion")
_SIDES = {"ours": "This run", "paper": "The paper"}

Row = Mapping[str, Any]


def draw(result: Mapping[str, Any]) -> list[Drawing]:
    """Draw the figures of a result of any experiment."""
    rows, experiment = result["rows"], result["experiment"]
    if experiment == "figure2":
        found = [draw_panels(result)]
    elif experiment == "table1":
        groups = dict.fromkeys(one["group"] for one in rows)
        found = [
            _tradeoff(f"table1-{number}", f"Table 1: {group}", rows, group)
            for number, group in enumerate(groups, start=1)
        ]
    else:
        found = [_parts(rows), _tradeoff("table2", "Table 2: perplexity against ε", rows)]
    return [replace(one, run=run_words(result)) for one in found]


def _tradeoff(name: str, title: str, rows: Sequence[Row], group: str = "") -> Drawing:
    """Draw perplexity against ε; ours, and the paper's on axes of its own if it is there."""
    rows = [one for one in rows if one["group"] == group]
    sides = [side for side in _SIDES if any(_point(one[side]) for one in rows)]
    entries = []
    for one in rows:
        points = [_point(one[side]) for side in sides]
        if not any(points):
            continue
        # A line of the paper alone names no neighbours; the published bound is for leave-one-out.
        known = one["ours"] or one["paper"]
        kind, unit = known["kind"], known.get("unit")
        neighbours = "add_remove" if kind == "published" else relation(known)
        promise = "no guarantee" if kind == "none" else format_promise(kind, neighbours)
        if unit not in (None, "shard") and kind != "none":
            promise += f" of one {unit}"
        values = [_values(one, side) for side, point in zip(sides, points, strict=True) if point]
        entries.append(Entry(one["method"], [*values, promise], kind, neighbours, points))
    caption, panels = MARKS, [""]
    if len(sides) > 1:
        caption += " The paper's bars are one standard deviation over its runs."
        panels = [_SIDES[side] for side in sides]
    return draw_tradeoff(name, title, caption, entries, panels)


def _values(one: Row, side: str) -> str:
    words = f"perplexity {format_perplexity(one[side]['perplexity'])}"
    if one[side].get("epsilon") is not None and one[side]["kind"] != "public":
        words = f"ε = {show_cost(one[side])}, {words}"
    return f"paper: {words}" if side == "paper" else words


def _point(side: Mapping[str, Any] | None) -> Point | None:
    """Return the point of one side, or None if it cannot be drawn."""
    if side is None or side.get("perplexity") is None:
        return None
    level = side.get("epsilon") is None or side["kind"] == "public"
    perplexity = float(side["perplexity"])
    epsilon = None if level else float(side["epsilon"])
    found = place(epsilon, perplexity, side.get("difference"))
    spread = side.get("perplexity_deviation") if "place" in side else None
    if found is None or spread is None:
        return found
    return found._replace(bar=(perplexity - spread, perplexity + spread))


def _parts(rows: Sequence[Row]) -> Drawing:
    """Draw Table 2b in percent, because our ε and the paper's differ too much in size."""
    bars = []
    for one in rows:
        for side, words in (("ours", ""), ("paper", " (paper)")):
            found = one[side] or {}
            parts = {part: float(found[part]) for part in _PARTS if found.get(part) is not None}
            whole = sum(parts.values())
            if len(parts) == len(_PARTS) and 0 < whole < math.inf:
                label = f"{wrapped(one['method'] + words, 32)}\n[{KIND_LABELS[found['kind']]}]"
                shares = {part: 100 * value / whole for part, value in parts.items()}
                bars.append((label, shares, f"ε = {show_cost(found, 'total')}"))
    caption = (
        "Mixing is the loss of the answers, screening the cost of the noisy test, and conversion "
        "the cost of turning Rényi divergence into (ε, δ). ε is in nats."
    )
    return draw_parts("Table 2b: where ε goes", caption, bars, "%", "table2-parts")
