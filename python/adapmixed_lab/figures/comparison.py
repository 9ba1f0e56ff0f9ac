"""Figures that compare methods, of reports and of experiments: perplexity and the parts of ε."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

from matplotlib.lines import Line2D

from adapmixed_lab.figures.style import (
    COLOURS,
    DASHES,
    GREY,
    MARKERS,
    Drawing,
    canvas,
    filling,
    is_wide,
    number_axis,
    wrapped,
)

LINE = 0.17  # inches of a line of a legend
_MARK = 7.0  # points
_COLUMNS = 2  # of a legend
_PARTS = (
    ("mixing", "#0072B2", ""),
    ("screening", "#D55E00", "////"),
    ("conversion", "#BBBBBB", ""),
)
MARKS = (
    "Circles are fixed guarantees, diamonds are data-dependent, ex-post values, and crosses are "
    "claims of the published bound, which is invalid. Full marks are for zero-out, empty marks for "
    "leave-one-out or, of DP-SGD, add/remove, and half marks for replace-one. The same ε in "
    "another shape or filling is not the same guarantee. Lines are references without an ε. A "
    "larger mark lies beneath a smaller one. Bars are 95 % intervals of the paired difference to "
    "the public model."
)


class Point(NamedTuple):
    """The place of a method; `epsilon` is None for a line, `bar` holds an interval's ends."""

    epsilon: float | None
    perplexity: float
    bar: tuple[float, float]


@dataclass(frozen=True)
class Entry:
    """A method in a figure, with its entry of the legend.

    Attributes:
        name: of the method.
        words: further lines of the legend's entry.
        kind: of its guarantee.
        neighbours: its adjacency, None without one.
        points: its place in each panel, None where it has none.
        colour: of its mark; "": the next one.
    """

    name: str
    words: Sequence[str]
    kind: str
    neighbours: str | None
    points: Sequence[Point | None]
    colour: str = ""

    @property
    def label(self) -> str:
        """The entry of the legend."""
        return "\n".join(map(wrapped, (self.name, *self.words)))


def place(
    epsilon: float | None, perplexity: float, difference: Mapping[str, Any] | None
) -> Point | None:
    """Return the point of a method, with its interval if there is one; None if it is infinite."""
    if math.isinf(perplexity) or epsilon == math.inf:
        return None
    bar = (perplexity, perplexity)
    if difference is not None and difference["low"] is not None:
        low, high = (
            perplexity * math.exp(difference[end] - difference["mean"]) for end in ("low", "high")
        )
        bar = (low, high)
    return Point(epsilon, perplexity, bar)


def draw_tradeoff(
    name: str, title: str, caption: str, entries: Sequence[Entry], panels: Sequence[str] = ("",)
) -> Drawing:
    """Draw perplexity against ε in each panel: marks exactly at their values, and lines."""
    colours, dashes = cycle(COLOURS), cycle(DASHES)
    looks: list[dict[str, Any]] = []
    for one in entries:
        if any(point and point.epsilon is None for point in one.points):
            looks.append({"color": GREY, "linewidth": 1.1, "linestyle": next(dashes)})
        else:
            mark = {"color": one.colour or next(colours), "marker": MARKERS.get(one.kind, "s")}
            looks.append({"linestyle": "none", **mark, **filling(one.neighbours)})
    labels = [one.label for one in entries]
    lines = sum(label.count("\n") + 1.4 for label in labels) / _COLUMNS
    with canvas(3.6 + LINE * math.ceil(lines), 1, len(panels)) as (figure, grid):
        for index, axes in enumerate(getattr(grid, "flat", [grid])):
            axes.set_title(panels[index])
            points = [one.points[index] for one in entries]
            _draw_plane(axes, [(p, look) for p, look in zip(points, looks, strict=True) if p])
        handles = [Line2D([], [], **look) for look in looks]
        figure.legend(
            handles, labels, loc="outside lower left", ncols=_COLUMNS, fontsize=8, handlelength=2
        )
    return Drawing(name, title, caption, figure)


def _draw_plane(axes: Any, places: Sequence[tuple[Point, Mapping[str, Any]]]) -> None:
    """Draw the points, of which later ones are smaller than those that they cover."""
    ends = [end for point, _ in places for end in point.bar]
    margin = 0.1 * (max(ends) - min(ends)) or 0.05 * max(ends)
    axes.set_ylim(min(ends) - margin, max(ends) + margin)
    axes.set(xlabel="ε (nats)", ylabel="perplexity (lower is better)")
    for point, look in places:
        if point.epsilon is None:
            axes.axhline(point.perplexity, **look)
    marks = [(point.epsilon, point, look) for point, look in places if point.epsilon is not None]
    paid = [epsilon for epsilon, *_ in marks]
    if paid and is_wide(paid):
        axes.set_xscale("log")
        axes.set_xlim(min(paid) / 2.5, max(paid) * 2.5)
    elif paid:
        axes.set_xlim(0, 1.2 * max(paid))
    number_axis(axes.xaxis)
    number_axis(axes.yaxis)
    at = [tuple(axes.transData.transform(point[:2])) for _, point, _ in marks]
    reach = _MARK * axes.figure.dpi / 72
    for number, (epsilon, (_, y, (low, high)), look) in enumerate(marks):
        covered = sum(math.dist(at[number], other) < reach for other in at[number + 1 :])
        axes.errorbar(
            epsilon, y, yerr=[[y - low], [high - y]] if low < high else None, elinewidth=1.0,
            capsize=2.5, markersize=_MARK + 4 * covered, clip_on=False, **look,
        )  # fmt: skip


def draw_parts(
    title: str,
    caption: str,
    bars: Sequence[tuple[str, Mapping[str, float], str]],
    unit: str = "nats",
    name: str = "breakdown",
) -> Drawing:
    """Draw a horizontal bar for each ε, made of its parts.

    Args:
        title, caption: of the figure.
        bars: (label, parts, the word at the bar's end). A conversion at large δ can be below 0.
        unit: of the parts.
        name: of the figure.
    """
    rows = range(len(bars))
    with canvas(1.5 + 0.55 * len(bars)) as (figure, axes):
        ends, starts = [0.0] * len(bars), [0.0] * len(bars)  # of the parts above and below 0
        for part, colour, hatch in _PARTS:
            for row, (_, parts, _) in enumerate(bars):
                width = parts.get(part, 0.0)
                side = starts if width < 0 else ends
                axes.barh(
                    row, width, 0.6, side[row], color=colour, edgecolor="white", linewidth=0.8,
                    hatch=hatch, label="" if row else part,
                )  # fmt: skip
                side[row] += width
        for row, (_, _, words) in enumerate(bars):
            axes.annotate(words, (ends[row], row), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(rows, [label for label, _, _ in bars])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(min(starts), 1.25 * max(ends))
        axes.set(xlabel=f"part of ε ({unit})")
        number_axis(axes.xaxis)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=3, handlelength=1.4)
    return Drawing(name, title, caption, figure)
