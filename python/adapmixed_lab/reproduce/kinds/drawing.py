"""The figures of the study of what members adapt, one for each corpus and public model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.lines import Line2D

from adapmixed_lab.figures.style import COLOURS, GREY, Drawing, canvas, number_axis
from adapmixed_lab.reproduce.measure import UNPROTECTED
from adapmixed_lab.reproduce.paper import PUBLIC

_PANELS = (UNPROTECTED, "ClippedLogPool, ε ≤ 3")
_MARKERS = "osD^"
_LEVEL: dict[str, Any] = {"color": GREY, "linestyle": (0, (2, 2)), "linewidth": 1.1}

Row = Mapping[str, Any]


def draw_kinds(result: Mapping[str, Any]) -> list[Drawing]:
    """Draw perplexity against cost, with a figure for each corpus and public model."""
    groups = dict.fromkeys(one["group"] for one in result["rows"])
    return [
        _figure(group, [one for one in result["rows"] if one["group"] == group], number)
        for number, group in enumerate(groups, start=1)
    ]


def _figure(group: str, rows: Sequence[Row], number: int) -> Drawing:
    title = f"What members adapt: {group}"
    kinds = list(dict.fromkeys(one["ours"]["adapt"] for one in rows))
    ranks = ", ".join(map(str, sorted({one["ours"]["rank"] for one in rows})))
    public = next(float(one["ours"]["perplexity"]) for one in rows if one["method"] == PUBLIC)
    with canvas(3.9, 1, len(_PANELS)) as (figure, panels):
        for axes, method in zip(panels, _PANELS, strict=True):
            for kind, colour, marker in zip(kinds, COLOURS, _MARKERS, strict=False):
                mine = [
                    one["ours"]
                    for one in rows
                    if one["method"] == method and one["ours"]["adapt"] == kind
                ]
                for size in dict.fromkeys(one["num_models"] for one in mine):
                    points = sorted(
                        (float(one["cost"]), float(one["perplexity"]), one["rank"])
                        for one in mine
                        if one["num_models"] == size
                    )
                    largest = size == max(one["num_models"] for one in mine)
                    axes.plot(
                        [x for x, _, _ in points], [y for _, y, _ in points], color=colour,
                        marker=marker, markersize=6, linewidth=1.3,
                        markerfacecolor=colour if largest else "white",
                    )  # fmt: skip
            axes.axhline(public, **_LEVEL)
            axes.set_xscale("log")
            number_axis(axes.xaxis)
            number_axis(axes.yaxis)
            axes.set(
                title=method,
                xlabel=f"multiply-adds of a token (public model: 1)\nlines join ranks {ranks}",
            )
        panels[0].set_ylabel("perplexity (lower is better)")
        sizes = sorted({one["ours"]["num_models"] for one in rows}, reverse=True)
        entries = [
            Line2D([], [], color=colour, marker=marker, markersize=6, linewidth=1.3)
            for _, colour, marker in zip(kinds, COLOURS, _MARKERS, strict=False)
        ]
        words = [*kinds]
        for size in sizes:
            entries.append(
                Line2D(
                    [], [], color=GREY, marker="o", markersize=6, linestyle="none",
                    markerfacecolor=GREY if size == sizes[0] else "white",
                )
            )  # fmt: skip
            words.append(f"N = {size}")
        entries.append(Line2D([], [], **_LEVEL))
        words.append(PUBLIC)
        figure.legend(
            entries, words, loc="outside lower center", ncols=len(words), handlelength=1.8
        )
    caption = (
        f"Perplexity against the cost of a token. Lines join ranks {ranks}, which grow to the "
        "right. All kinds of members have the same shards, queries and passes. Values are means "
        f"over {len(rows[0]['ours']['perplexities'])} seeds."
    )
    return Drawing(f"kinds-{number}", title, caption, figure)
