"""The report's figures as inline SVG: self-contained, and the same bytes for the same input."""

import math
from collections.abc import Mapping, Sequence

from adapmixed.report.view import Method, read_methods, show_epsilon
from adapmixed_lab.figures.diagnostic_figures import (
    draw_charges,
    draw_screened,
    draw_training,
    draw_validation,
    draw_weights,
)
from adapmixed_lab.figures.labels import draw_references, place_labels, short, side_by_side
from adapmixed_lab.figures.style import (
    COLOURS,
    LINE_STYLES,
    MARKERS,
    Drawing,
    canvas,
    filling,
    format_promise,
    is_wide,
    number_axis,
    promises_legend,
    stack_parts,
    svg_text,
)

__all__ = ["Drawing", "draw"]

_MARK = 8.0  # points
_TWO_COLUMNS = 40  # longest legend entry, in characters, that allows two columns
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


def draw(report: Mapping[str, object]) -> tuple[Drawing, ...]:
    """Draw the figures that a report has data for.

    These are ε over queries, perplexity over ε, and parts of ε. Diagnostics add weights, charges of
    single models, and screened queries. Records of the members' training add their losses.
    """
    methods = read_methods(report)
    drawings = (
        _draw_curves(methods),
        _draw_tradeoff(methods),
        _draw_breakdown(methods),
        draw_weights(methods),
        draw_charges(methods),
        draw_screened(methods),
        draw_training(report.get("training")),
        draw_validation(report.get("training")),
    )
    return tuple(drawing for drawing in drawings if drawing is not None)


def _draw_curves(methods: Sequence[Method]) -> Drawing | None:
    title = "Privacy spent against queries answered"
    shown = [(m, colour) for m, colour in _coloured(methods) if _finite_curve(m)]
    if not shown:
        return None
    above = _count_above([_finite_curve(method) for method, _ in shown])
    with canvas(3.9) as (figure, axes):
        for (method, colour), others in zip(shown, above, strict=True):
            points = _finite_curve(method)
            axes.plot(
                [queries for queries, _ in points],
                [epsilon for _, epsilon in points],
                color=colour,
                linestyle=LINE_STYLES.get(method.kind, "-"),
                marker=MARKERS.get(method.kind, "o"),
                **filling(method.adjacency),
                markevery=[len(points) - 1],
                linewidth=2 + 3 * others,
                markersize=6 + 3 * others,
                zorder=(2.0 if method.kind == "fixed" else 2.5) - 0.1 * others,
                clip_on=False,
            )
        axes.set_xlim(left=0)
        if is_wide([epsilon for m, _ in shown for _, epsilon in _finite_curve(m)]):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="queries answered", ylabel="ε (nats)")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        number_axis(axes.yaxis)
        labels = [f"{short(m.name)}: {format_promise(m.kind, m.adjacency)}" for m, _ in shown]
        columns = 2 if len(shown) > 1 and max(map(len, labels)) <= _TWO_COLUMNS else 1
        figure.set_figheight(3.6 + 0.2 * math.ceil(len(shown) / columns))
        figure.legend(axes.get_lines(), labels, loc="outside lower left", ncols=columns)
        svg = svg_text(figure, "curves", title)
    kinds = {method.kind for method, _ in shown}
    caption = " ".join(words for kind, words in _CURVE_WORDS.items() if kind in kinds)
    if any(above):
        caption += " If curves coincide, a wider one lies beneath a narrower one."
    return Drawing("curves", title, caption, svg)


def _draw_tradeoff(methods: Sequence[Method]) -> Drawing | None:
    title = "Perplexity against privacy"
    finite = [(m, colour) for m, colour in _coloured(methods) if math.isfinite(m.perplexity)]
    if not finite:
        return None
    lines = [m for m in methods if m.kind in ("public", "none") and math.isfinite(m.perplexity)]
    with canvas(3.9) as (figure, axes):
        values = [m.epsilon for m, _ in finite if m.epsilon is not None]
        paid = [m.perplexity for m, _ in finite]
        if is_wide(values):
            axes.set_xscale("log")
            axes.set_xlim(min(values) / 2.5, max(values) * 2.5)
        else:
            axes.set_xlim(0, 1.3 * max(values))
        heights = paid + [m.perplexity for m in lines]
        margin = 0.14 * (max(heights) - min(heights)) or 0.05 * max(heights)
        axes.set_ylim(min(heights) - margin, max(heights) + margin)
        axes.set(title=title, xlabel="ε (nats)", ylabel="perplexity (lower is better)")
        number_axis(axes.xaxis)
        shown = [(m.kind, m.adjacency) for m, _ in finite]
        promises_legend(figure, shown, loc="outside lower left")
        taken = draw_references(axes, lines)
        places = side_by_side(axes, [(x, y, y) for x, y in zip(values, paid, strict=True)], _MARK)
        for (method, colour), place in zip(finite, places, strict=True):
            marker = MARKERS.get(method.kind, "o")
            at = (place, method.perplexity)
            look = {"color": colour, "markersize": _MARK, **filling(method.adjacency)}
            axes.plot(*at, marker, **look)
        names = [short(method.name) for method, _ in finite]
        place_labels(axes, list(zip(names, places, paid, strict=True)), taken)
        svg = svg_text(figure, "tradeoff", title)
    caption = (
        "Lower and further to the left is better, but only among marks of one shape and filling. "
        "Circles are fixed guarantees, and diamonds are data-dependent values. Full marks are for "
        "zero-out, empty marks for leave-one-out, and half marks for replace-one. The same ε in "
        "another shape or filling is not the same guarantee. Lines are methods without an ε: the "
        "public model, and answers without any protection."
    )
    if any(abs(x - place) > 1e-9 * x for x, place in zip(values, places, strict=True)):
        caption += " Marks that would cover one another stand side by side, a little off their ε."
    if any(method.kind == "published" for method, _ in finite):
        caption += " Crosses are claims of the published bound, which is invalid."
    missing = [m.name for m in methods if math.isinf(m.perplexity) or m.epsilon == math.inf]
    if missing:
        caption += f" Not shown, because a value is infinite: {', '.join(missing)}."
    return Drawing("tradeoff", title, caption, svg)


def _draw_breakdown(methods: Sequence[Method]) -> Drawing | None:
    title = "Where the data-dependent ε goes"
    shown = [m for m in methods if m.kind == "data-dependent, ex-post" and _has_budget(m)]
    shown = [m for m in shown if all(math.isfinite(v) for v in m.breakdown.values())]
    if not shown:
        return None
    with canvas(1.5 + 0.55 * len(shown)) as (figure, axes):
        start, ends = stack_parts(axes, [m.breakdown for m in shown])
        for row, (method, end) in enumerate(zip(shown, ends, strict=True)):
            text = f"ε = {show_epsilon(method.epsilon)}"
            axes.annotate(text, (end, row), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(shown)), [short(m.name) for m in shown])
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlim(start, 1.25 * max(ends))
        axes.set(title=title, xlabel="part of ε (nats)")
        number_axis(axes.xaxis)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=3, handlelength=1.4)
        svg = svg_text(figure, "breakdown", title)
    caption = (
        "The parts are those of the shard with the largest ε. Mixing is the sum of its realised "
        "losses. Screening is the cost of the noisy test that sends a query to the public model. "
        "Conversion is the fixed cost of turning Rényi divergence into (ε,\u00a0δ)."
    )
    return Drawing("breakdown", title, caption, svg)


def _has_budget(method: Method) -> bool:
    """Return whether ε is finite and above 0."""
    return method.epsilon is not None and 0 < method.epsilon < math.inf


def _coloured(methods: Sequence[Method]) -> list[tuple[Method, str]]:
    """Return the methods with a finite ε above 0, each with its colour in every figure."""
    shown = [method for method in methods if _has_budget(method)]
    return [(m, COLOURS[i % len(COLOURS)]) for i, m in enumerate(shown)]


def _count_above(curves: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
    """Return how many later curves coincide with each one, to half a percent at all points."""

    def alike(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
        return len(one) == len(other) and all(
            queries == others and math.isclose(epsilon, another, rel_tol=5e-3)
            for (queries, epsilon), (others, another) in zip(one, other, strict=True)
        )

    return [
        sum(alike(one, other) for other in curves[index + 1 :]) for index, one in enumerate(curves)
    ]


def _finite_curve(method: Method) -> list[tuple[int, float]]:
    return [(n, e) for n, e in method.curve if e is not None and 0 < e < math.inf]
