"""The figures of a result file, drawn from its content alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.lines import Line2D

from adapmixed.report.view import KIND_LABELS, format_perplexity
from adapmixed_lab.figures.style import (
    BARS,
    COLOURS,
    DASHES,
    GREY,
    Drawing,
    bar_of,
    canvas,
    draw_plane,
    stack_parts,
    wrapped,
)
from adapmixed_lab.reproduce.marks import LEGEND, look, promise
from adapmixed_lab.reproduce.panels import draw_panels
from adapmixed_lab.reproduce.result import run_words, show_cost

_FONT_SIZE = 8.0
_COLUMNS = 2  # of a legend
_PARTS = ("mixing", "screening", "conversion")
_SIDES = ("ours", "paper")

Row = Mapping[str, Any]


def draw(result: Mapping[str, Any]) -> list[Drawing]:
    """Draw the figures of a result of any experiment."""
    kinds: dict[str, Callable[[Mapping[str, Any]], list[Drawing]]] = {
        "figure2": lambda found: [draw_panels(found)],
        "table1": _table1,
        "table2": _table2,
    }
    run = run_words(result)
    return [replace(one, run=run) for one in kinds[result["experiment"]](result)]


def _table1(result: Mapping[str, Any]) -> list[Drawing]:
    groups = dict.fromkeys(one["group"] for one in result["rows"])
    found = []
    for number, group in enumerate(groups, start=1):
        rows = [one for one in result["rows"] if one["group"] == group]
        found.append(_tradeoff(f"table1-{number}", f"Table 1: {group}", rows))
    return found


def _table2(result: Mapping[str, Any]) -> list[Drawing]:
    rows = result["rows"]
    return [_breakdown(result), _tradeoff("table2", "Table 2: perplexity against ε", rows)]


def _tradeoff(name: str, title: str, rows: Sequence[Row]) -> Drawing:
    """Draw perplexity against ε; ours, and the paper's on axes of its own if it is there."""
    sides = [(side, [(one, p) for one in rows if (p := _point(one[side]))]) for side in _SIDES]
    sides = [(side, points) for side, points in sides if points]
    shown = [one for one in rows if any(_point(one[side]) for side, _ in sides)]
    looks = _looks(shown)
    entries = [_entry(one) for one in shown]
    lines = sum(entry.count("\n") + 1.5 for entry in entries) / _COLUMNS
    with canvas(3.6 + 0.14 * math.ceil(lines), 1, len(sides)) as (figure, grid):
        panels = getattr(grid, "flat", [grid])
        for axes, (side, points) in zip(panels, sides, strict=True):
            marks = [(*p[:3], looks[one["method"]]) for one, p in points if not p.level]
            levels = [(p.perplexity, looks[one["method"]]) for one, p in points if p.level]
            draw_plane(axes, marks, levels)
            if len(sides) > 1:
                axes.set_title("The paper" if side == "paper" else "This run")
        figure.legend(
            [Line2D([], [], **{"linestyle": "none", **looks[one["method"]]}) for one in shown],
            entries, loc="outside lower center", ncols=_COLUMNS, fontsize=_FONT_SIZE,
            handlelength=2,
        )  # fmt: skip
    spread = " The paper's are one standard deviation over its runs." if len(sides) > 1 else ""
    return Drawing(name, title, f"{BARS}{spread} {LEGEND}", figure)


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the look of each method: a mark of its own colour, or a grey line for a level."""
    colours, dashes = cycle(COLOURS), cycle(DASHES)
    found: dict[str, dict[str, Any]] = {}
    for one in rows:
        level = any(point.level for side in _SIDES if (point := _point(one[side])))
        line = {"color": GREY, "linewidth": 1.1, "linestyle": next(dashes)} if level else {}
        found[one["method"]] = line or {"color": next(colours), **look(one)}
    return found


def _entry(one: Row) -> str:
    """Return lines of the legend: the name, the values, and the promise."""
    values = []
    for side in _SIDES:
        if point := _point(one[side]):
            epsilon = "" if point.level else f"ε = {show_cost(one[side])}, "
            words = f"{epsilon}perplexity {format_perplexity(point.perplexity)}"
            values.append(f"paper: {words}" if side == "paper" else words)
    return "\n".join([wrapped(one["method"]), *values, wrapped(promise(one))])


class _Point(NamedTuple):
    epsilon: float
    perplexity: float
    bar: tuple[float, float]
    level: bool
    """Whether it is drawn as a line, because it has no ε."""


def _point(side: Mapping[str, Any] | None) -> _Point | None:
    """Return the point of one side, or None if it cannot be drawn."""
    if side is None or side.get("perplexity") is None:
        return None
    level = side.get("epsilon") is None or side["kind"] == "public"
    epsilon = 0.0 if level else float(side["epsilon"])
    perplexity = float(side["perplexity"])
    if math.isinf(perplexity) or math.isinf(epsilon):
        return None
    spread = float(side.get("perplexity_deviation") or 0.0) if "place" in side else 0.0
    bar = bar_of(perplexity, side.get("difference"))
    return _Point(epsilon, perplexity, (bar[0] - spread, bar[1] + spread), level)


def _breakdown(result: Mapping[str, Any]) -> Drawing:
    """Draw Table 2b in percent, because our ε and the paper's differ too much in size."""
    title = "Table 2b: where ε goes"
    shown = []
    for one in result["rows"]:
        for side, words in (("ours", ""), ("paper", " (paper)")):
            found = one[side] or {}
            if any(found.get(part) is None for part in _PARTS):
                continue
            parts = {part: float(found[part]) for part in _PARTS}
            whole = sum(parts.values())
            if 0 < whole < math.inf:
                shares = {part: 100 * value / whole for part, value in parts.items()}
                total = show_cost(found, "total")
                name = wrapped(f"{one['method']}{words}", 32)
                shown.append((f"{name}\n[{KIND_LABELS[found['kind']]}]", shares, total))
    with canvas(1.3 + 0.5 * len(shown)) as (figure, axes):
        _, ends = stack_parts(axes, [shares for _, shares, _ in shown])
        for line, (end, (_, _, total)) in enumerate(zip(ends, shown, strict=True)):
            axes.annotate(
                f"ε = {total}", (end, line), (5, 0), textcoords="offset points", va="center",
                fontsize=_FONT_SIZE,
            )  # fmt: skip
        axes.set_yticks(range(len(shown)), [words for words, _, _ in shown], fontsize=_FONT_SIZE)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.set_xlim(0, 120)
        axes.set_xticks(range(0, 101, 20))
        axes.set(xlabel="part of ε (%)")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=3, handlelength=1.4)
    caption = (
        "Mixing is the loss of the answers, screening the cost of the noisy test, and conversion "
        "the cost of turning Rényi divergence into (ε, δ). ε is in nats."
    )
    return Drawing("table2-parts", title, caption, figure)
