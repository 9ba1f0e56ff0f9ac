"""The figures of a result file, drawn from its content alone."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.lines import Line2D

from adapmixed.report.view import KIND_LABELS, format_perplexity
from adapmixed_lab.figures.figures import Drawing
from adapmixed_lab.figures.labels import settle, side_by_side
from adapmixed_lab.figures.style import (
    COLOURS,
    GREY,
    canvas,
    is_wide,
    number_axis,
    stack_parts,
    svg_text,
)
from adapmixed_lab.reproduce.kinds.drawing import draw_kinds
from adapmixed_lab.reproduce.marks import LEGEND, look, promise
from adapmixed_lab.reproduce.panels import draw_panels
from adapmixed_lab.reproduce.result import show_cost
from adapmixed_lab.reproduce.studies.drawing import draw_studies

_FONT_SIZE = 8.0
_COLUMNS = 2  # of a legend
_MARK = 6.5  # size, in points
_PARTS = ("mixing", "screening", "conversion")
_SIDES = (("ours", "Ours"), ("paper", "The paper"))

_NATS = "ε (nats; marks that would meet\nstand next to their ε)"

Row = Mapping[str, Any]


def draw(result: Mapping[str, Any]) -> list[Drawing]:
    """Draw the figures of a result of any experiment."""
    if result["experiment"] == "figure2":
        return [draw_panels(result)]
    if result["experiment"] == "table1":
        return _table1(result)
    if result["experiment"] == "table2":
        return [
            _breakdown(result),
            _tradeoff("table2", "Table 2: perplexity against ε", result["rows"]),
        ]
    if result["experiment"] == "kinds":
        return draw_kinds(result)
    return draw_studies(result)


def _table1(result: Mapping[str, Any]) -> list[Drawing]:
    groups = dict.fromkeys(one["group"] for one in result["rows"])
    found = []
    for number, group in enumerate(groups, start=1):
        rows = [one for one in result["rows"] if one["group"] == group]
        title = f"Table 1, {result['inputs']['dataset']}: {group}"
        found.append(_tradeoff(f"table1-{number}", title, rows))
    return found


def _tradeoff(name: str, title: str, rows: Sequence[Row]) -> Drawing:
    """Draw perplexity against ε, ours and the paper's side by side, each on its own axes."""
    sides = [
        (words, {one["method"]: point for one in rows if (point := _point(one[side]))})
        for side, words in _SIDES
    ]
    sides = [(words, points) for words, points in sides if points]
    levels = {name for _, points in sides for name, point in points.items() if point.level}
    shown = [one for one in rows if any(one["method"] in points for _, points in sides)]
    looks = _looks(shown, levels)
    with canvas(3.5 + 0.31 * math.ceil(len(shown) / _COLUMNS), 1, len(sides)) as (figure, grid):
        panels = list(zip(getattr(grid, "flat", [grid]), sides, strict=True))
        for axes, (words, points) in panels:
            _limit(axes, list(points.values()))
            axes.set(title=words, xlabel=_NATS, ylabel="perplexity (lower is better)")
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        figure.legend(
            [Line2D([], [], **looks[one["method"]]) for one in shown],
            [_entry(one, level=one["method"] in levels) for one in shown],
            loc="outside lower center", ncols=_COLUMNS, fontsize=_FONT_SIZE, handlelength=1.6,
        )  # fmt: skip
        settle(figure)
        for axes, (_, points) in panels:
            _draw_points(axes, points, looks)
        svg = svg_text(figure, name, title)
    caption = (
        "Bars are one standard deviation over runs. Marks that would cover one another stand side "
        f"by side, a little off their ε. {LEGEND}"
    )
    return Drawing(name, title, caption, svg)


def _looks(rows: Sequence[Row], levels: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the look of each method: a mark of its own colour, or a grey line for a level."""
    colours, dashes = cycle(COLOURS), cycle(((0, (2, 2)), (0, (6, 2)), "-"))
    return {
        one["method"]: {"color": GREY, "linewidth": 1.1, "linestyle": next(dashes)}
        if one["method"] in levels
        else {"color": next(colours), "linestyle": "none", "markersize": _MARK, **look(one)}
        for one in rows
    }


def _entry(one: Row, *, level: bool) -> str:
    """Return two lines of the legend: the name with its values, and the promise.

    The values are needed because a mark may stand next to its ε.
    """
    values = []
    for side, _ in _SIDES:
        if point := _point(one[side]):
            value = format_perplexity(point.perplexity) if level else show_cost(one[side])
            values.append(f"paper {value}" if side == "paper" else value)
    return f"{one['method']} ({'perplexity' if level else 'ε'} {', '.join(values)})\n{promise(one)}"


class _Point(NamedTuple):
    epsilon: float
    perplexity: float
    deviation: float
    level: bool
    """Whether it is drawn as a line, because it has no ε."""


def _point(side: Mapping[str, Any] | None) -> _Point | None:
    """Return the point of one side, or None if it cannot be drawn."""
    if side is None or side.get("perplexity") is None:
        return None
    level = side.get("epsilon") is None or side["kind"] == "public"
    epsilon = 0.0 if level else float(side["epsilon"])
    perplexity = float(side["perplexity"])
    deviation = 0.0 if level else float(side.get("perplexity_deviation") or 0.0)
    if math.isinf(perplexity) or math.isinf(epsilon):
        return None
    return _Point(epsilon, perplexity, deviation, level)


def _limit(axes: Any, points: Sequence[_Point]) -> None:
    """Set the limits of the axes, which decide the places of marks."""
    paid = [point.epsilon for point in points if not point.level]
    if paid and is_wide(paid):
        axes.set_xscale("log")
        axes.set_xlim(min(paid) / 3, max(paid) * 3)
    elif paid:
        axes.set_xlim(0, 1.2 * max(paid))
    low = min(point.perplexity - point.deviation for point in points)
    high = max(point.perplexity + point.deviation for point in points)
    margin = 0.08 * (high - low) or 0.05 * high
    axes.set_ylim(low - margin, high + margin)
    number_axis(axes.xaxis)


def _draw_points(
    axes: Any, points: Mapping[str, _Point], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    marks = {name: point for name, point in points.items() if not point.level}
    bars = [(x, y - spread, y + spread) for x, y, spread, _ in marks.values()]
    places = side_by_side(axes, bars, _MARK)
    for (name, point), x in zip(marks.items(), places, strict=True):
        axes.errorbar(
            x, point.perplexity, yerr=point.deviation or None, elinewidth=1.0, capsize=2.5,
            **looks[name],
        )  # fmt: skip
    for name, point in points.items():
        if point.level:
            axes.axhline(point.perplexity, zorder=0, **looks[name])


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
                name = textwrap.fill(f"{one['method']}{words}", 32)
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
        axes.set(title=title, xlabel="part of ε (%)")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=3, handlelength=1.4)
        svg = svg_text(figure, "table2-parts", title)
    caption = (
        "Mixing is the loss of the answers, screening the cost of the noisy test, and conversion "
        "the cost of turning Rényi divergence into (ε, δ). ε is in nats."
    )
    return Drawing("table2-parts", title, caption, svg)
