"""The look of every figure: colours, marks for the kinds of guarantee, paper size, SVG and PDF.

Importing this module imports matplotlib. Figures are self-contained SVG elements, and the same
input gives the same bytes. They are legible in print, because kinds differ in shape and dash as
well as in colour.
"""

import html
import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, which is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = {"fixed": "-", "data-dependent, ex-post": (0, (4, 1.6)), "published": (0, (1, 1.6))}
MARKERS = {"fixed": "o", "data-dependent, ex-post": "D", "published": "X"}
FILLS = {"zero_out": "full", "add_remove": "none", "replace_one": "left"}
"""How the mark of an ε is filled, by its neighbours."""
GREY = "#555555"
DASHES = ((0, (2, 2)), (0, (6, 2)), "-", (0, (6, 2, 1, 2)))
"""Lines of the references, which have no ε."""
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
    "pdf.fonttype": 42,
    # Names come from the user, so a dollar sign does not start a formula.
    "text.parse_math": False,
}
_WIDTH = 7.2  # inches
_LOG_RATIO = 10.0  # a linear axis hides values that lie further apart


@dataclass(frozen=True)
class DrawnFigure:
    """A figure with its title and caption.

    Attributes:
        name: of its files.
        title: what is drawn.
        caption: how to read it.
        figure: the drawing, without its title.
        run: what it was measured on, the second line of the title.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    run: str = ""

    @cached_property
    def svg(self) -> str:
        """The figure as an <svg> element: ids unique in a page, no fixed size, an aria label."""
        buffer = io.StringIO()
        # Without these entries there is no metadata, hence no date and no foreign address.
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with _look():
            self._titled().savefig(buffer, format="svg", metadata=nothing)
        text = buffer.getvalue()
        # Comments spell out the text of glyphs; the drawing does not need them.
        text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r'( id="| xlink:href="#|url\(#)', rf"\g<1>{self.name}-", text)
        text = re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', r"<svg\1", text)
        label = html.escape(self.title)
        return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()

    @cached_property
    def pdf(self) -> bytes:
        """The figure as a PDF."""
        buffer = io.BytesIO()
        nothing = dict.fromkeys(("Creator", "Producer", "CreationDate"))
        with _look():
            self._titled().savefig(buffer, format="pdf", metadata=nothing)
        return buffer.getvalue()

    def _titled(self) -> Figure:
        if self.figure.get_suptitle() == "":
            with _look():
                words = "\n".join(filter(None, (self.title, wrapped(self.run, 90))))
                self.figure.suptitle(words, fontsize=10, fontweight="bold", x=0.01, ha="left")
                self.figure.draw_without_rendering()
                self.figure.set_layout_engine("none")  # SVG and PDF then have one layout
        return self.figure


def is_wide(values: Sequence[float]) -> bool:
    """Return whether a linear axis would hide some of these values, all > 0."""
    return max(values) > _LOG_RATIO * min(values)


def number_axis(axis: Any) -> None:
    """Show plain numbers at the major ticks, and nothing at the minor ones."""
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axis.set_minor_formatter(lambda value, _: "")


def wrapped(name: str, width: int = 46) -> str:
    """Return a whole name on lines of bounded length; a name that is cut could be another's."""
    return textwrap.fill("".join(c if c.isprintable() else " " for c in name), width)


def _look() -> Any:
    return style.context(["default", dict(_SETTINGS)])


@contextmanager
def canvas(height: float, rows: int = 1, columns: int = 1) -> Iterator[tuple[Figure, Any]]:
    """Yield a figure of this height in inches with one pair of axes, or an array of them.

    Draw the figure inside the context. The user's own matplotlib settings then neither
    change the figure nor are changed.
    """
    with _look():
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns)


def filling(adjacency: str | None) -> dict[str, Any]:
    """Return the style of an ε's mark by its neighbours; an empty mark is white inside."""
    fill = FILLS.get(adjacency or "", "full")
    return {"markerfacecolor": "white"} if fill == "none" else {"fillstyle": fill}
