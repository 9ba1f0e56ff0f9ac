"""The figures of a result file, drawn from its content alone."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from adapmixed.experiments.panels import draw_panels
from adapmixed.experiments.paper import DP_SGD
from adapmixed.experiments.result import show_cost
from adapmixed.experiments.studies.drawing import draw_studies
from adapmixed.report.figures import Drawing
from adapmixed.report.labels import boxes_of, place_labels, settle
from adapmixed.report.style import (
    COLOURS,
    GREY,
    MARKERS,
    canvas,
    is_wide,
    kind_legend,
    number_axis,
    stack_parts,
    svg_text,
)
from adapmixed.report.view import KIND_LABELS

_FONT_SIZE = 8.0
_WRAP = 26  # characters of a label's line
_PARTS = ("mixing", "screening", "conversion")
_SIDES = (("ours", "Ours"), ("paper", "The paper"))
_KIND_WORDS = (
    "Circles are fixed guarantees, diamonds data-dependent values, crosses claims of the published "
    "bound, which is invalid: the same ε is not the same promise."
)

Row = Mapping[str, Any]


def draw(result: Mapping[str, Any]) -> list[Drawing]:
    """The figures of any result."""
    if result["experiment"] == "figure2":
        return [draw_panels(result)]
    if result["experiment"] == "table1":
        return _table1(result)
    if result["experiment"] == "table2":
        return [
            _breakdown(result),
            _tradeoff("table2", "Table 2: perplexity against ε", result["rows"]),
        ]
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
    """Perplexity against ε, ours and the paper's side by side on axes of their own."""
    colours = {one["method"]: COLOURS[i % len(COLOURS)] for i, one in enumerate(rows)}
    sides = [side for side in _SIDES if any(_point(one, side[0]) for one in rows)]
    with canvas(3.9, 1, len(sides)) as (figure, grid):
        labels = []
        for axes, (side, words) in zip(getattr(grid, "flat", [grid]), sides, strict=True):
            labels.append((axes, *_plot_side(axes, rows, side, colours)))
            axes.set_title(words)
        figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
        kinds = {one[side]["kind"] for one in rows for side, _ in sides if one[side] is not None}
        kind_legend(figure, kinds, loc="outside lower center")
        settle(figure)
        for axes, points, lines in labels:
            wrapped = [(textwrap.fill(name, _WRAP), x, y) for name, x, y in points]
            inks = [colours[name] for name, _, _ in points]
            place_labels(axes, wrapped, boxes_of(lines), font_size=_FONT_SIZE, colours=inks)
        svg = svg_text(figure, name, title)
    caption = (
        "Perplexity (lower is better), bars one standard deviation over runs. Hollow: a block of "
        f"text is protected, not a shard. {_KIND_WORDS}"
    )
    return Drawing(name, title, caption, svg)


def _plot_side(
    axes: Any, rows: Sequence[Row], side: str, colours: Mapping[str, str]
) -> tuple[list[tuple[str, float, float]], list[Any]]:
    """Draws one side; returns the points that are to be labelled and the names of its lines."""
    points, names = [], []
    for one in rows:
        found = _point(one, side)
        if found is None:
            continue
        epsilon, perplexity, deviation, kind = found
        colour = colours[one["method"]]
        if epsilon is None or kind == "public":
            words = f"{one['method']} ({perplexity:.1f})"
            axes.axhline(perplexity, color=GREY, linewidth=1.1, linestyle=(0, (2, 2)), zorder=0)
            name = axes.annotate(
                words, (0.99, perplexity), (0, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", ha="right", fontsize=_FONT_SIZE, color=GREY,
            )  # fmt: skip
            names.append(name)
            continue
        axes.errorbar(
            epsilon, perplexity, yerr=deviation or None, color=colour, elinewidth=1.0, capsize=2.5,
            marker=MARKERS.get(kind, "o"), markersize=7,
            fillstyle="none" if one["method"] == DP_SGD else "full",
        )  # fmt: skip
        points.append((one["method"], epsilon, perplexity))
    values = [x for _, x, _ in points]
    if values and is_wide(values):
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 3, max(values) * 3)
    elif values:
        axes.set_xlim(0, 1.35 * max(values))
    axes.margins(y=0.15)
    number_axis(axes.xaxis)
    axes.set(xlabel="ε (nats)", ylabel="perplexity")
    return points, names


def _point(one: Row, side: str) -> tuple[float | None, float, float | None, str] | None:
    """(ε or None, perplexity, deviation or None, kind), None where one cannot be drawn."""
    found = one[side]
    if found is None or found.get("perplexity") is None:
        return None
    perplexity = float(found["perplexity"])
    epsilon = None if found.get("epsilon") is None else float(found["epsilon"])
    deviation = found.get("perplexity_deviation")
    if math.isinf(perplexity) or (epsilon is not None and math.isinf(epsilon)):
        return None
    return epsilon, perplexity, None if deviation is None else float(deviation), found["kind"]


def _breakdown(result: Mapping[str, Any]) -> Drawing:
    """Table 2b: the parts of every ε, in percent: ours and the paper's differ too much in size."""
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
        "Mixing is the loss of the answers, screening the noisy test, conversion the price of "
        "turning Rényi divergence into (ε, δ); ε in nats."
    )
    return Drawing("table2-parts", title, caption, svg)
