"""The report as one self-contained HTML page, from the template ``report.html``, and its figures.

Figures are self-contained, too, and the same bytes for the same input.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.lines import Line2D

from adapmixed.evaluation import Evaluation
from adapmixed.evaluation.report import (
    INTERVAL_WORDS,
    KEPT_WORDS,
    KIND_LABELS,
    MISSING,
    TITLES,
    UTILITY_TITLES,
    UTILITY_WORDS,
    Report,
    format_neighbours,
    format_perplexity,
    format_promise,
    row,
    show_epsilon,
)
from adapmixed.files import write_file
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

_LINE = 0.17  # inches of a line of a legend
_OPERATOR = "For the operator only."


def write_page(report: Report, folder: Path | str, *, figures: bool = False) -> tuple[Path, ...]:
    """Write report.json and report.html, each replaced as a whole or not at all.

    Args:
        report: the results.
        folder: created if it is missing.
        figures: also write every figure as NAME.svg and NAME.pdf.

    Returns:
        the paths of report.json (UTF-8, strict JSON), report.html (no scripts, no network) and of
        the figures.

    Raises:
        ValueError: the report has a value that strict JSON cannot hold.
    """
    drawings = draw(report)
    files = {"report.html": render(report, drawings).encode()}
    for image in drawings if figures else ():
        files |= {f"{image.name}.svg": f"{image.svg}\n".encode(), f"{image.name}.pdf": image.pdf}
    paths = [report.write(Path(folder) / "report.json")]
    for name, content in files.items():
        paths.append(Path(folder) / name)
        write_file(paths[-1], content)
    return tuple(paths)


def render(report: Report, drawings: tuple[DrawnFigure, ...] = ()) -> str:
    """Return the page with these drawings, in which all text of the report is escaped."""
    page: str = template("report.html").render(
        report=report,
        summary=[_SUMMARY, *map(_summary, report.evaluations)],
        words=f"{INTERVAL_WORDS} {KEPT_WORDS}",
        utility=[UTILITY_TITLES, *report.utility_rows()],
        utility_words=UTILITY_WORDS,
        drawings=drawings,
    )
    return page


def template(name: str) -> Any:
    """Return a template, which escapes all that it is given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"badge": _badge}
    return environment.get_template(name)


_SUMMARY = (*TITLES[:-1], "δ", "guarantee", "neighbours", "unit", "screened", "tokens/s")


def _summary(method: Evaluation) -> list[str]:
    """Return the cells of a method, in the order of `_SUMMARY`."""
    guarantee, rate = method.guarantee, method.tokens_per_second
    promised = guarantee.epsilon is not None
    screens = method.screened > 0 or method.breakdown.get("screening", 0.0) > 0
    return [
        *row(method)[:-1],
        repr(guarantee.delta).removesuffix(".0") if promised else MISSING,  # not rounded
        _badge(guarantee.kind),
        format_neighbours(guarantee.adjacency),
        guarantee.unit if promised else MISSING,
        f"{100 * method.screened:.1f}%" if screens else MISSING,
        MISSING if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
    ]


def _badge(kind: str) -> Markup:
    """Return the label of a kind of guarantee as markup."""
    label = KIND_LABELS.get(kind, kind)
    return Markup('<span class="badge {}">{}</span>').format(kind.rpartition(", ")[2], label)


def draw(report: Report) -> tuple[DrawnFigure, ...]:
    """Draw the figures that a report has data for.

    These are ε over queries and perplexity over ε. Records of the members' training add their
    validation losses.
    """
    methods = report.evaluations
    drawings = (
        _draw_curves(methods),
        _draw_tradeoff(methods),
        _draw_validation(report.validation),
    )
    run = report.words()
    return tuple(replace(drawing, run=run) for drawing in drawings if drawing is not None)


def _draw_curves(methods: Sequence[Evaluation]) -> DrawnFigure | None:
    """Draw ε over queries if any grows with them; a covered line is wider than the one on it."""
    shown = []
    for m, colour in _coloured(methods):
        points = [(n, e) for n, e in m.curve if e is not None and 0 < e < math.inf]
        shown += [(m, colour, points)] if points else []
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
        if is_wide([epsilon for *_, points in shown for _, epsilon in points]):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_ylabel("ε (nats)")
        axes.set_xlim(left=0)
        axes.set_xlabel("queries answered")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        number_axis(axes.yaxis)
        figure.legend(axes.get_lines(), labels, loc="outside lower left")
    caption = (
        "Solid lines are fixed guarantees: the planned ε from the first query on. Dashed lines are "
        f"data-dependent. {_OPERATOR} Dotted lines are claims of the published bound, which is "
        "invalid."
    )
    return DrawnFigure("curves", "Privacy spent against queries answered", caption, figure)


def _alike(curve: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    """Return whether two curves cannot be told apart in a picture."""
    return len(curve) == len(other) and all(
        math.isclose(a, b, rel_tol=5e-3) for (_, a), (_, b) in zip(curve, other, strict=True)
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
        for (method, colour), epsilon in zip(finite, paid, strict=True):
            marker = MARKERS.get(method.guarantee.kind, "o")
            look: dict[str, Any] = {"color": colour, "marker": marker, "linestyle": "none"}
            look |= filling(method.guarantee.adjacency)
            low, high = bar(method)
            reach = [[method.perplexity - low], [high - method.perplexity]]
            axes.errorbar(
                epsilon, method.perplexity, elinewidth=1.0, capsize=2.5, clip_on=False,
                yerr=reach if low < high else None, markersize=7, **look,
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
        "Bars are 95 % intervals of the paired difference to the public model."
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
    difference = method.difference
    if difference is None or difference["low"] is None:
        return method.perplexity, method.perplexity
    low, high = (math.exp(difference[end] - difference["mean"]) for end in ("low", "high"))
    return method.perplexity * low, method.perplexity * high


def _promise(method: Evaluation) -> str:
    none = method.guarantee.kind == "none"
    return "no guarantee" if none else format_promise(method)


def _words(method: Evaluation) -> str:
    """Return the words of a legend that give a method's promise and values."""
    words = _promise(method)
    words += f": ε = {show_epsilon(method.guarantee.epsilon)}" if _has_budget(method) else ""
    return f"{words}, perplexity {format_perplexity(method.perplexity)}"


def _has_budget(method: Evaluation) -> bool:
    """Return whether ε is finite and above 0."""
    return method.guarantee.epsilon is not None and 0 < method.guarantee.epsilon < math.inf


def _coloured(methods: Sequence[Evaluation]) -> list[tuple[Evaluation, str]]:
    """Return the methods with a finite ε above 0, each with its colour in every figure."""
    shown = [method for method in methods if _has_budget(method)]
    return [(m, COLOURS[i % len(COLOURS)]) for i, m in enumerate(shown)]


def _draw_validation(validation: Sequence[Mapping[str, Any]]) -> DrawnFigure | None:
    """Draw every member's validation loss and the public model's."""
    ordered = sorted(validation, key=lambda member: member["loss"])
    if not ordered:
        return None
    places = range(1, len(ordered) + 1)
    with canvas(3.4) as (figure, axes):
        loss = [member["loss"] for member in ordered]
        public = [member["public_loss"] for member in ordered]
        axes.vlines(places, loss, public, color="#CCCCCC", linewidth=0.8)
        axes.plot(places, public, "o", color=GREY, fillstyle="none", label="public model")
        axes.plot(places, loss, "o", color=COLOURS[0], label="member")
        axes.set(xlabel="members, sorted by loss", ylabel="nats per held-out token")
        axes.set_xlim(left=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        number_axis(axes.yaxis)
        figure.legend(loc="outside lower left", ncols=2, handlelength=1.4)
    caption = (
        "Losses at the end of training, on the text that was held out of each member’s own shard. "
        f"The public model’s loss is on the same text. {_OPERATOR}"
    )
    return DrawnFigure("validation", "Validation loss of the members", caption, figure)
