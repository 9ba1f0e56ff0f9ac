"""The report's figures: self-contained, and the same bytes for the same input."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from matplotlib.lines import Line2D

from adapmixed.evaluation import Evaluation
from adapmixed.report.report import Report, format_perplexity, format_promise, show_epsilon
from adapmixed_lab.figures.diagnostic_figures import (
    draw_charges,
    draw_screened,
    draw_training,
    draw_validation,
    draw_weights,
)
from adapmixed_lab.figures.style import (
    COLOURS,
    DASHES,
    GREY,
    LINE_STYLES,
    MARKERS,
    DrawnFigure,
    canvas,
    filling,
    is_wide,
    number_axis,
    wrapped,
)

__all__ = ["DrawnFigure", "draw"]

_LINE = 0.17  # inches of a line of a legend
_MARK = 7.0  # points
_PARTS = (
    ("mixing", "#0072B2", ""),
    ("screening", "#D55E00", "////"),
    ("conversion", "#BBBBBB", ""),
)
_CURVE_WORDS = {
    "fixed": (
        "A fixed guarantee (solid line) is the planned ε from the first query on, however early "
        "the answers stop."
    ),
    "data-dependent, ex-post": (
        "A data-dependent ε (dashed line) grows by the loss that each answer realised. Its curve "
        "depends on the private data and is for the operator only."
    ),
    "published": (
        "The dotted line is the claim of the published bound, which is invalid and no guarantee."
    ),
}


def draw(report: Report) -> tuple[DrawnFigure, ...]:
    """Draw the figures that a report has data for.

    These are ε over queries, perplexity over ε, and parts of ε. Diagnostics add weights, charges of
    single models, and screened queries. Records of the members' training add their losses.
    """
    methods = report.methods
    drawings = (
        _draw_curves(methods),
        _draw_tradeoff(methods),
        _draw_breakdown(methods),
        draw_weights(methods),
        draw_charges(methods),
        draw_screened(methods),
        draw_training(report.training),
        draw_validation(report.training),
    )
    run = report.words()
    return tuple(replace(drawing, run=run) for drawing in drawings if drawing is not None)


def _draw_curves(methods: Sequence[Evaluation]) -> DrawnFigure | None:
    """Draw ε over queries if any grows with them; a covered line is wider than the one on it."""
    shown = [(m, colour, _finite_curve(m)) for m, colour in _coloured(methods)]
    shown = [one for one in shown if one[2]]
    constant = [len({epsilon for _, epsilon in points}) == 1 for *_, points in shown]
    if all(constant):
        return None
    labels = ["\n".join(map(wrapped, (m.name, _promise(m)))) for m, *_ in shown]
    with canvas(3.6 + _LINE * sum(label.count("\n") + 1 for label in labels)) as (figure, axes):
        for at, (method, colour, points) in enumerate(shown):
            start = [(0, points[0][1])] if constant[at] else []
            covered = sum(_alike(points, others) for *_, others in shown[at + 1 :])
            kind, adjacency = method.guarantee.kind, method.guarantee.adjacency
            axes.plot(
                *zip(*start, *points, strict=True), color=colour, linewidth=2.0 + 2.5 * covered,
                linestyle=LINE_STYLES.get(kind, "-"), marker=MARKERS.get(kind, "o"),
                **filling(adjacency),
                markevery=[len(start) + len(points) - 1], markersize=6, clip_on=False,
            )  # fmt: skip
        axes.set_xlim(left=0)
        if is_wide([epsilon for *_, points in shown for _, epsilon in points]):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(xlabel="queries answered", ylabel="ε (nats)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        number_axis(axes.yaxis)
        figure.legend(axes.get_lines(), labels, loc="outside lower left")
    kinds = {method.guarantee.kind for method, *_ in shown}
    caption = " ".join(words for kind, words in _CURVE_WORDS.items() if kind in kinds)
    return DrawnFigure("curves", "Privacy spent against queries answered", caption, figure)


def _alike(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    """Return whether two curves cannot be told apart in a picture."""
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=5e-3) for (_, a), (_, b) in zip(one, other, strict=True)
    )


def _draw_tradeoff(methods: Sequence[Evaluation]) -> DrawnFigure | None:
    """Draw perplexity against ε: marks exactly at their values, and lines for references."""
    finite = [(m, colour) for m, colour in _coloured(methods) if math.isfinite(m.perplexity)]
    if not finite:
        return None
    levels = [
        m for m in methods if m.guarantee.kind in ("public", "none") and math.isfinite(m.perplexity)
    ]
    shown = [*(m for m, _ in finite), *levels]
    labels = ["\n".join(map(wrapped, (m.name, _words(m)))) for m in shown]
    lines = sum(label.count("\n") + 1 for label in labels) / 2
    with canvas(3.6 + _LINE * math.ceil(lines)) as (figure, axes):
        handles: list[Any] = []
        paid = [m.guarantee.epsilon or 0.0 for m, _ in finite]
        ends = [end for m in shown for end in bar(m)]
        margin = 0.1 * (max(ends) - min(ends)) or 0.05 * max(ends)
        axes.set_ylim(min(ends) - margin, max(ends) + margin)
        if is_wide(paid):
            axes.set_xscale("log")
            axes.set_xlim(min(paid) / 2.5, max(paid) * 2.5)
        else:
            axes.set_xlim(0, 1.2 * max(paid))
        near = _MARK * figure.dpi / 72
        at = [
            tuple(axes.transData.transform((m.guarantee.epsilon, m.perplexity))) for m, _ in finite
        ]
        for number, (method, colour) in enumerate(finite):
            mark = {
                "color": colour,
                "marker": MARKERS.get(method.guarantee.kind, "o"),
                "linestyle": "none",
            }
            look: dict[str, Any] = mark | filling(method.guarantee.adjacency)
            # Later marks are smaller than those that they cover, so that every rim is seen.
            covered = sum(math.dist(at[number], other) < near for other in at[number + 1 :])
            low, high = bar(method)
            reach = [[method.perplexity - low], [high - method.perplexity]]
            axes.errorbar(
                paid[number], method.perplexity, elinewidth=1.0, capsize=2.5, clip_on=False,
                yerr=reach if low < high else None, markersize=_MARK + 4 * covered, **look,
            )  # fmt: skip
            handles.append(Line2D([], [], **look))
        for method, dash in zip(levels, cycle(DASHES), strict=False):
            look = {"color": GREY, "linewidth": 1.2, "linestyle": dash, "zorder": 1}
            handles.append(axes.axhline(method.perplexity, **look))
        axes.set(xlabel="ε (nats)", ylabel="perplexity (lower is better)")
        number_axis(axes.xaxis)
        number_axis(axes.yaxis)
        figure.legend(
            handles, labels, loc="outside lower left", ncols=2, fontsize=8, handlelength=2
        )
    caption = (
        "Lower and further to the left is better, but only among marks of one shape and filling. "
        "Circles are fixed guarantees, and diamonds are data-dependent values. Full marks are for "
        "zero-out, empty marks for leave-one-out, and half marks for replace-one. The same ε in "
        "another shape or filling is not the same guarantee. Lines are references without an ε. "
        "A larger mark lies beneath a smaller one. Bars are 95 % intervals of the paired "
        "difference to the public model."
    )
    if any(method.guarantee.kind == "published" for method, _ in finite):
        caption += " Crosses are claims of the published bound, which is invalid."
    missing = [
        m.name for m in methods if math.isinf(m.perplexity) or m.guarantee.epsilon == math.inf
    ]
    if missing:
        caption += f" Not shown, because a value is infinite: {', '.join(missing)}."
    return DrawnFigure("tradeoff", "Perplexity against privacy", caption, figure)


def bar(method: Evaluation) -> tuple[float, float]:
    """Return the ends of a perplexity's bar, both the perplexity itself without an interval."""
    found = method.difference
    if found is None or found["low"] is None:
        return method.perplexity, method.perplexity
    low, high = (math.exp(found[end] - found["mean"]) for end in ("low", "high"))
    return method.perplexity * low, method.perplexity * high


def _promise(method: Evaluation) -> str:
    none = method.guarantee.kind == "none"
    return "no guarantee" if none else format_promise(method)


def _words(method: Evaluation) -> str:
    """Return the words of a legend that give a method's promise and values."""
    words = _promise(method)
    words += f": ε = {show_epsilon(method.guarantee.epsilon)}" if _has_budget(method) else ""
    return f"{words}, perplexity {format_perplexity(method.perplexity)}"


def _draw_breakdown(methods: Sequence[Evaluation]) -> DrawnFigure | None:
    shown = [m for m in methods if m.guarantee.kind == "data-dependent, ex-post" and _has_budget(m)]
    shown = [m for m in shown if all(math.isfinite(v) for v in m.breakdown.values())]
    if not shown:
        return None
    with canvas(1.5 + 0.55 * len(shown)) as (figure, axes):
        ends, starts = [0.0] * len(shown), [0.0] * len(shown)  # of the parts above and below 0
        for part, colour, hatch in _PARTS:
            for row, method in enumerate(shown):
                width = method.breakdown.get(part, 0.0)
                side = starts if width < 0 else ends  # a conversion at large δ can be below 0
                axes.barh(
                    row, width, 0.6, side[row], color=colour, edgecolor="white", linewidth=0.8,
                    hatch=hatch, label="" if row else part,
                )  # fmt: skip
                side[row] += width
        for row, method in enumerate(shown):
            text = f"ε = {show_epsilon(method.guarantee.epsilon)}"
            axes.annotate(text, (ends[row], row), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(shown)), [wrapped(m.name) for m in shown])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(min(starts), 1.25 * max(ends))
        axes.set(xlabel="part of ε (nats)")
        number_axis(axes.xaxis)
        figure.legend(loc="outside lower right", ncols=3, handlelength=1.4)
    caption = (
        "The parts are those of the shard with the largest ε. Mixing is the sum of its realised "
        "losses. Screening is the cost of the noisy test that sends a query to the public model. "
        "Conversion is the fixed cost of turning Rényi divergence into (ε,\u00a0δ)."
    )
    return DrawnFigure("breakdown", "Where the data-dependent ε goes", caption, figure)


def _has_budget(method: Evaluation) -> bool:
    """Return whether ε is finite and above 0."""
    return method.guarantee.epsilon is not None and 0 < method.guarantee.epsilon < math.inf


def _coloured(methods: Sequence[Evaluation]) -> list[tuple[Evaluation, str]]:
    """Return the methods with a finite ε above 0, each with its colour in every figure."""
    shown = [method for method in methods if _has_budget(method)]
    return [(m, COLOURS[i % len(COLOURS)]) for i, m in enumerate(shown)]


def _finite_curve(method: Evaluation) -> list[tuple[int, float]]:
    return [(n, e) for n, e in method.curve if e is not None and 0 < e < math.inf]
