"""The report's figures as inline SVG: self-contained, and the same bytes for the same input.

Importing this module imports matplotlib; nothing else in the package does.
"""

import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from adapmixed.report.labels import draw_references, label_points, short
from adapmixed.report.view import KIND_LABELS, Method, read_methods, show_epsilon

# Okabe and Ito's palette without its yellow, which is lost on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_LINE_STYLES = {"fixed": "-", "data-dependent, ex-post": (0, (4, 1.6)), "published": (0, (1, 1.6))}
_MARKERS = {"fixed": "o", "data-dependent, ex-post": "D", "published": "X"}
_PARTS = (
    ("mixing", "#0072B2", ""),
    ("screening", "#D55E00", "////"),
    ("conversion", "#BBBBBB", ""),
)
_GREY = "#555555"
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
    # Names are the user's: a dollar sign in one is no formula.
    "text.parse_math": False,
}
_WIDTH = 7.2  # inches
_LOG_RATIO = 30.0  # a linear axis hides values that lie further apart
_TWO_COLUMNS = 40  # characters of a legend's entry, up to which two stand side by side
_CURVE_WORDS = {
    "fixed": (
        "A fixed guarantee (solid) is the planned ε from the first query on, whenever the answers "
        "stop."
    ),
    "data-dependent, ex-post": (
        "A data-dependent one (dashed) is charged what each answer realised: its curve depends on "
        "the private data and is for the operator only."
    ),
    "published": (
        "The dotted curve is the claim of the published bound, which is invalid: no guarantee."
    ),
}


@dataclass(frozen=True)
class Drawing:
    """A figure of the report: its SVG element (no XML prologue) and the words around it."""

    name: str
    title: str
    caption: str
    svg: str


def draw(report: Mapping[str, object]) -> tuple[Drawing, ...]:
    """The figures that a report has data for: ε over queries, perplexity over ε, parts of ε."""
    methods = read_methods(report)
    drawings = (_draw_curves(methods), _draw_tradeoff(methods), _draw_breakdown(methods))
    return tuple(drawing for drawing in drawings if drawing is not None)


def _draw_curves(methods: Sequence[Method]) -> Drawing | None:
    title = "Privacy spent against queries answered"
    shown = [(m, colour) for m, colour in _coloured(methods) if _finite_curve(m)]
    if not shown:
        return None
    with _figure(3.9) as (figure, axes):
        for method, colour in shown:
            points = _finite_curve(method)
            axes.plot(
                [queries for queries, _ in points],
                [epsilon for _, epsilon in points],
                color=colour,
                linestyle=_LINE_STYLES.get(method.kind, "-"),
                marker=_MARKERS.get(method.kind, "o"),
                markevery=[len(points) - 1],
                clip_on=False,
            )
        axes.set_xlim(left=0)
        if _is_wide([epsilon for m, _ in shown for _, epsilon in _finite_curve(m)]):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="queries answered", ylabel="ε (nats)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        _number_axis(axes.yaxis)
        labels = [f"{short(m.name)}: {KIND_LABELS.get(m.kind, m.kind)}" for m, _ in shown]
        columns = 2 if len(shown) > 1 and max(map(len, labels)) <= _TWO_COLUMNS else 1
        figure.set_figheight(3.6 + 0.2 * math.ceil(len(shown) / columns))
        figure.legend(axes.get_lines(), labels, loc="outside lower left", ncols=columns)
        svg = _svg(figure, "curves", title)
    kinds = {method.kind for method, _ in shown}
    caption = " ".join(words for kind, words in _CURVE_WORDS.items() if kind in kinds)
    return Drawing("curves", title, caption, svg)


def _draw_tradeoff(methods: Sequence[Method]) -> Drawing | None:
    title = "Perplexity against privacy"
    finite = [(m, colour) for m, colour in _coloured(methods) if math.isfinite(m.perplexity)]
    if not finite:
        return None
    lines = [m for m in methods if m.kind in ("public", "none") and math.isfinite(m.perplexity)]
    with _figure(3.9) as (figure, axes):
        values = [m.epsilon for m, _ in finite if m.epsilon is not None]
        if _is_wide(values):
            axes.set_xscale("log")
            axes.set_xlim(min(values) / 2.5, max(values) * 2.5)
        else:
            axes.set_xlim(0, 1.3 * max(values))
        heights = [m.perplexity for m, _ in finite] + [m.perplexity for m in lines]
        margin = 0.14 * (max(heights) - min(heights)) or 0.05 * max(heights)
        axes.set_ylim(min(heights) - margin, max(heights) + margin)
        axes.set(title=title, xlabel="ε (nats)", ylabel="perplexity (lower is better)")
        _number_axis(axes.xaxis)
        for method, colour in finite:
            marker = _MARKERS.get(method.kind, "o")
            axes.plot(method.epsilon, method.perplexity, marker, color=colour, markersize=8)
        taken = draw_references(axes, lines)
        label_points(axes, [m for m, _ in finite], taken)
        svg = _svg(figure, "tradeoff", title)
    caption = (
        "Down and to the left is better. Circles are fixed guarantees, diamonds data-dependent "
        "values: the same ε does not mean the same promise. Lines are methods without an ε to pay: "
        "the public model, and answers without any protection."
    )
    if any(method.kind == "published" for method, _ in finite):
        caption += " Crosses are claims of the published bound, which is invalid."
    missing = [m.name for m in methods if math.isinf(m.perplexity) or m.epsilon == math.inf]
    if missing:
        caption += f" Not shown, because a value is infinite: {', '.join(missing)}."
    return Drawing("tradeoff", title, caption, svg)


def _draw_breakdown(methods: Sequence[Method]) -> Drawing | None:
    title = "Where the data-dependent ε goes"
    shown = [m for m in methods if m.kind == "data-dependent, ex-post" and m.has_budget]
    shown = [m for m in shown if all(math.isfinite(v) for v in m.breakdown.values())]
    if not shown:
        return None
    with _figure(1.5 + 0.55 * len(shown)) as (figure, axes):
        ends = [0.0] * len(shown)  # of the parts above 0
        starts = [0.0] * len(shown)  # of the parts below 0: a conversion at large δ can be
        for part, colour, hatch in _PARTS:
            widths = [m.breakdown.get(part, 0.0) for m in shown]
            lefts = [(s if w < 0 else e) for w, s, e in zip(widths, starts, ends, strict=True)]
            axes.barh(
                range(len(shown)), widths, 0.6, lefts,
                color=colour, edgecolor="white", linewidth=0.8, hatch=hatch, label=part,
            )  # fmt: skip
            ends = [e + max(w, 0.0) for e, w in zip(ends, widths, strict=True)]
            starts = [s + min(w, 0.0) for s, w in zip(starts, widths, strict=True)]
        for row, (method, end) in enumerate(zip(shown, ends, strict=True)):
            text = f"ε = {show_epsilon(method.epsilon)}"
            axes.annotate(text, (end, row), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(shown)), [short(m.name) for m in shown])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(min(starts), 1.25 * max(ends))
        axes.set(title=title, xlabel="part of ε (nats)")
        _number_axis(axes.xaxis)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=3, handlelength=1.4)
        svg = _svg(figure, "breakdown", title)
    caption = (
        "For the shard that binds: mixing is the sum of its realised losses, screening the noisy "
        "test that sends a query to the public model, conversion the fixed price of turning Rényi "
        "divergence into (ε,\u00a0δ)."
    )
    return Drawing("breakdown", title, caption, svg)


def _coloured(methods: Sequence[Method]) -> list[tuple[Method, str]]:
    """The methods with a finite ε above 0, each with the colour it has in every figure."""
    shown = [method for method in methods if method.has_budget]
    return [(m, _COLOURS[i % len(_COLOURS)]) for i, m in enumerate(shown)]


def _finite_curve(method: Method) -> list[tuple[int, float]]:
    return [(n, e) for n, e in method.curve if e is not None and 0 < e < math.inf]


def _is_wide(values: Sequence[float]) -> bool:
    return max(values) > _LOG_RATIO * min(values)


def _number_axis(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    axis.set_minor_formatter(lambda value, _: "")


@contextmanager
def _figure(height: float) -> Iterator[tuple[Figure, Any]]:
    """A figure with one pair of axes, of the given height in inches.

    Drawing and saving both happen inside: the user's own matplotlib settings neither change the
    figure nor are changed.
    """
    with style.context(["default", dict(_SETTINGS)]):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.add_subplot()


def _svg(figure: Figure, name: str, title: str) -> str:
    """The <svg> element: ids made unique in the page, size left to it, and a name to read out."""
    buffer = io.StringIO()
    # Without these there is no block of metadata: no date, no address of a vocabulary.
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=nothing)
    text = buffer.getvalue()
    # Glyphs come with comments that spell the text out; they are no part of the drawing.
    text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'( id="| xlink:href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'^<svg([^>]*?) width="[^"]*" height="[^"]*"', r"<svg\1", text)
    return text.replace("<svg", f'<svg role="img" aria-label="{title}"', 1).strip()
