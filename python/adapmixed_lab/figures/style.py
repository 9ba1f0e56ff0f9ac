"""The look of every figure: colours, marks for the kinds of guarantee, paper size, SVG as text.

Importing this module imports matplotlib. Figures are self-contained SVG elements, and the same
input gives the same bytes. They are legible in print, because kinds differ in shape and dash as
well as in colour.
"""

import html
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from adapmixed.report.view import KIND_LABELS, format_neighbours

# Okabe and Ito's palette without its yellow, which is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = {"fixed": "-", "data-dependent, ex-post": (0, (4, 1.6)), "published": (0, (1, 1.6))}
MARKERS = {"fixed": "o", "data-dependent, ex-post": "D", "published": "X"}
FILLS = {"zero_out": "full", "add_remove": "none", "add/remove": "none", "replace_one": "left"}
"""How the mark of an ε is filled, by its neighbours."""
GREY = "#555555"
_PARTS = (
    ("mixing", "#0072B2", ""),
    ("screening", "#D55E00", "////"),
    ("conversion", "#BBBBBB", ""),
)
_SETTINGS: Mapping[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 4.5,
    "lines.linewidth": 2.0,
    "svg.fonttype": "path",
    "svg.hashsalt": "adapmixed",
    # Names come from the user, so a dollar sign does not start a formula.
    "text.parse_math": False,
}
_WIDTH = 7.2  # inches
_LOG_RATIO = 30.0  # a linear axis hides values that lie further apart


@dataclass(frozen=True)
class Drawing:
    """A figure of a report: its SVG element (without XML prologue), title and caption."""

    name: str
    title: str
    caption: str
    svg: str


def is_wide(values: Sequence[float]) -> bool:
    """Return whether a linear axis would hide some of these values, all > 0."""
    return max(values) > _LOG_RATIO * min(values)


def number_axis(axis: Any) -> None:
    """Show plain numbers at the major ticks, and nothing at the minor ones."""
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axis.set_minor_formatter(lambda value, _: "")


@contextmanager
def canvas(height: float, rows: int = 1, columns: int = 1) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure of this height in inches with one pair of axes, or an array of them.

    Draw and save the figure inside the context. The user's own matplotlib settings then neither
    change the figure nor are changed.
    """
    with style.context(["default", dict(_SETTINGS)]):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns)


def filling(adjacency: str | None) -> dict[str, Any]:
    """Return the style of an ε's mark by its neighbours; an empty mark is white inside."""
    fill = FILLS.get(adjacency or "", "full")
    return {"markerfacecolor": "white"} if fill == "none" else {"fillstyle": fill}


def format_promise(kind: str, adjacency: str | None) -> str:
    """Return the kind and the adjacency of an ε."""
    words = KIND_LABELS.get(kind, kind)
    return words if adjacency is None else f"{words}, {format_neighbours(adjacency)}"


def promises_legend(
    figure: Figure, promises: Iterable[tuple[str, str | None]], **settings: Any
) -> None:
    """Add a legend of the marks, with an entry for each (kind, neighbours) of a figure."""
    found = list(dict.fromkeys(promises))
    handles = [
        Line2D(
            [], [], color=GREY, marker=MARKERS.get(kind, "o"), linestyle="none", markersize=7,
            **filling(adjacency),
        )
        for kind, adjacency in found
    ]  # fmt: skip
    words = [format_promise(*promise) for promise in found]
    figure.legend(handles, words, ncols=len(found), handlelength=1.2, **settings)


def stack_parts(axes: Any, breakdowns: Sequence[Mapping[str, float]]) -> tuple[float, list[float]]:
    """Draw one horizontal bar for each ε, made of its parts.

    Returns:
        (the lowest start, the end of each bar); a conversion at large δ can be below 0.
    """
    ends = [0.0] * len(breakdowns)  # of the parts above 0
    starts = [0.0] * len(breakdowns)  # of the parts below 0
    for part, colour, hatch in _PARTS:
        widths = [parts.get(part, 0.0) for parts in breakdowns]
        lefts = [(s if w < 0 else e) for w, s, e in zip(widths, starts, ends, strict=True)]
        axes.barh(
            range(len(breakdowns)), widths, 0.6, lefts,
            color=colour, edgecolor="white", linewidth=0.8, hatch=hatch, label=part,
        )  # fmt: skip
        ends = [e + max(w, 0.0) for e, w in zip(ends, widths, strict=True)]
        starts = [s + min(w, 0.0) for s, w in zip(starts, widths, strict=True)]
    return min(starts), ends


def svg_text(figure: Figure, name: str, title: str) -> str:
    """Return the <svg> element with ids unique in the page, no fixed size, and an aria label."""
    buffer = io.StringIO()
    # Without these entries there is no metadata, hence no date and no foreign address.
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    # Comments spell out the text of glyphs; the drawing does not need them.
    text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="| xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', r"<svg\1", text)
    label = html.escape(title)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
