"""Figure 2 as six panels: our points and the paper's, each relative to its reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import LogLocator

from adapmixed.report.view import format_perplexity
from adapmixed_lab.figures.figures import Drawing
from adapmixed_lab.figures.labels import place_labels, settle
from adapmixed_lab.figures.style import COLOURS, GREY, MARKERS, canvas, number_axis, svg_text
from adapmixed_lab.reproduce.result import show_cost

_FONT_SIZE = 7.5
_SAME = 9.0  # pixels: points nearer than this share one label
_WIDE = 4.0  # ratio of multiples above which their axis is logarithmic
_FAR = 0.005  # multiples below this stand at the panel's edge, or they would squeeze all others
_TITLE = "Figure 2: one setting of AdaPMixED at a time"
_OURS, _PAPER = COLOURS[0], COLOURS[1]

_Point = tuple[str, float, float]


def draw_panels(result: Mapping[str, Any]) -> Drawing:
    """Draw six panels of labelled points: relative spent ε to the right, perplexity upwards."""
    panels = result["settings"]["panels"]
    handles: dict[str, Any] = {}
    labels: list[tuple[Any, list[_Point], list[str], float]] = []
    with canvas(5.6, 2, 3) as (figure, grid):
        for axes, (letter, panel) in zip(grid.flat, panels.items(), strict=True):
            rows = [one for one in result["rows"] if one["group"] == letter]
            sides = (
                ("ours", panel["anchor"], _OURS, "full"),
                ("paper", panel["paper_anchor"], _PAPER, "none"),
            )
            edge = _edge([x for side, at, *_ in sides for _, x, _ in relative(rows, side, at)])
            words: list[_Point] = []
            colours: list[str] = []
            for side, anchor, colour, fill in sides:
                points = relative(rows, side, anchor)
                if not points:
                    continue
                points = [(word, max(x, edge), y) for word, x, y in points]
                handles[side] = _draw(axes, points, anchor, colour, fill)
                # Both references lie at one place, so one label is enough.
                shared = side == "paper" and words and panel["anchor"] == anchor
                words += [("" if shared and p[0] == anchor else p[0], *p[1:]) for p in points]
                colours += [colour] * len(points)
            axes.set_title(f"({letter}) {panel['title']}", fontsize=9, pad=5)
            axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
            axes.axvline(1, color=GREY, linewidth=0.8, zorder=0)
            _scale(axes, [x for _, x, _ in words])
            labels.append((axes, words, colours, edge))
        below = "ε without its conversion (f: with it), as a multiple of the reference's"
        if any(edge > 0 for *_, edge in labels):
            below += f" (←: less than {_FAR:g})"
        figure.supxlabel(below, fontsize=9)
        figure.supylabel("change of perplexity (%)", fontsize=9)
        names = {"ours": _legend(result), "paper": "the paper, N = 100 (both ε ex-post)"}
        figure.legend(
            handles.values(), [names[side] for side in handles],
            loc="outside upper center", ncols=2, handlelength=2.5,
        )  # fmt: skip
        settle(figure)
        for axes, words, colours, edge in labels:
            joined = [
                (f"← {word}" if word and x == edge else word, x, y)
                for word, x, y in _joined(axes, words, colours)
            ]
            place_labels(axes, joined, font_size=_FONT_SIZE, colours=colours)
        svg = svg_text(figure, "figure2", _TITLE)
    return Drawing("figure2", _TITLE, _caption(result), svg)


def relative(rows: Sequence[Mapping[str, Any]], side: str, anchor: str) -> list[_Point]:
    """Return (label, multiple of the anchor's spent ε, change of perplexity in %) of one side.

    Spent ε is ε minus the conversion from Rényi divergence, which most settings do not move. If the
    panel's settings do move the conversion, spent ε is all of ε.

    Args:
        rows: of one panel; rows without finite numbers on that side are left out, and all rows if
            nothing was spent at the anchor.
        side: "ours" or "paper".
        anchor: the label that is at (1, 0).
    """
    found = {one["label"]: one[side] for one in rows if one[side] is not None}
    if not found:
        return []
    conversions = {label: float(value["conversion"]) for label, value in found.items()}
    moved = max(conversions.values()) - min(conversions.values()) > 1e-9
    spent = {
        label: float(value["epsilon"]) - (0.0 if moved else conversions[label])
        for label, value in found.items()
    }
    base = float(found[anchor]["perplexity"])
    if not (0 < spent[anchor] < math.inf and base < math.inf):
        return []
    points = [
        (label, spent[label] / spent[anchor], 100 * (float(value["perplexity"]) / base - 1))
        for label, value in found.items()
    ]
    return [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]


def _edge(multiples: Sequence[float]) -> float:
    """Return where points that spend far less than the reference are drawn; 0 if there are none."""
    near = [x for x in multiples if x >= _FAR]
    return 0.0 if len(near) == len(multiples) else 0.6 * min(near)


def _scale(axes: Any, multiples: Sequence[float]) -> None:
    """Set a logarithmic axis if the multiples lie far apart, and leave room for the labels."""
    low, high = min(multiples), max(multiples)
    if low > 0 and high > _WIDE * low:
        axes.set_xscale("log")
        within = (1.0, 2.0, 5.0) if high < 30 * low else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=within, numticks=5))
    axes.margins(0.26, 0.16)
    axes.tick_params(labelsize=_FONT_SIZE)
    number_axis(axes.xaxis)
    number_axis(axes.yaxis)


def _joined(axes: Any, words: Sequence[_Point], colours: Sequence[str]) -> list[_Point]:
    """Join the words of points of one colour that lie on one another, at the first point.

    The figure must be settled.
    """
    places = [axes.transData.transform((x, y)) for _, x, y in words]
    found: list[list[str]] = []
    for index, (word, _, _) in enumerate(words):
        near = (
            first
            for first in range(index)
            if colours[first] == colours[index]
            and found[first]
            and math.dist(places[first], places[index]) < _SAME
        )
        first = next(near, index)
        found.append([])
        if word:
            found[first].append(word)
    joined = [("\n" if max(map(len, f), default=0) > 5 else " · ").join(f) for f in found]
    return [(text, x, y) for text, (_, x, y) in zip(joined, words, strict=True)]


def _draw(axes: Any, points: Sequence[_Point], anchor: str, colour: str, fill: str) -> Any:
    """Draw the line of one side with its reference ringed, and return its legend handle."""
    (line,) = axes.plot(
        [x for _, x, _ in points],
        [y for _, _, y in points],
        color=colour,
        linestyle="-" if fill == "full" else (0, (2, 1.5)),
        linewidth=0.9,
        marker=MARKERS["data-dependent, ex-post"],
        markersize=4.5,
        fillstyle=fill,
    )
    at = [(x, y) for label, x, y in points if label == anchor]
    axes.plot(*zip(*at, strict=True), "o", color=colour, fillstyle="none", markersize=9)
    return line


def _legend(result: Mapping[str, Any]) -> str:
    inputs = result["inputs"]
    return f"ours, N = {inputs['num_models']}, {result['settings']['queries']:,} queries"


def _caption(result: Mapping[str, Any]) -> str:
    """Return the caption, which states ε and perplexity at the reference."""
    rows = [one for one in result["rows"] if one["group"] == "a"]
    anchor = result["settings"]["panels"]["a"]
    words = []
    for side, name, key in (("ours", "ours", "anchor"), ("paper", "the paper's", "paper_anchor")):
        found = [one[side] for one in rows if one["label"] == anchor[key] and one[side]]
        words += [
            f"{name} ε = {show_cost(one)}, perplexity {format_perplexity(one['perplexity'])}"
            for one in found
        ]
    return (
        f"At the preset: {'; '.join(words)}. Every ε is data-dependent and ex-post (diamonds), "
        "by the paper's rule. The ringed point is the reference; in (d) it is an N that both have. "
        f"An arrow stands for less than {_FAR:g} of the reference's ε, far to the left."
    )
