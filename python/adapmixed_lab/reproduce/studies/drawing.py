"""The figures of the studies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from matplotlib.ticker import LogLocator

from adapmixed_lab.figures.style import (
    COLOURS,
    DASHES,
    GREY,
    LINE_STYLES,
    Drawing,
    canvas,
    number_axis,
)
from adapmixed_lab.reproduce.marks import LEGEND, look, promise
from adapmixed_lab.reproduce.paper import PUBLIC

_FONT_SIZE = 8.0
_KINDS = f"Solid lines are fixed guarantees, and dashed lines data-dependent values. {LEGEND}"

Row = Mapping[str, Any]


def draw_studies(result: Mapping[str, Any]) -> list[Drawing]:
    """Draw one figure for each study."""
    groups = {
        group: [one for one in result["rows"] if one["group"] == group]
        for group in result["settings"]["titles"]
    }
    draw: dict[str, Callable[[Sequence[Row]], Drawing]] = {
        "models": partial(
            _sizes, "models", "Shards keep their size, so fewer models have seen less"
        ),
        "shards": partial(_sizes, "shards", "Fewer models have larger shards of the same"),
        "screening": _screening,
        "frontiers": _frontiers,
    }
    return [draw[group](rows) for group, rows in groups.items()]


def _sizes(study: str, words: str, rows: Sequence[Row]) -> Drawing:
    title = {
        "models": "ε and perplexity against the number of models",
        "shards": "ε and perplexity, the same text divided among N models",
    }[study]
    names = list(dict.fromkeys(one["method"] for one in rows if one["label"]))
    with canvas(3.7, 1, 2) as (figure, (left, right)):
        for name, colour in zip(names, COLOURS, strict=False):
            mine = [one for one in rows if one["method"] == name]
            counts = [one["ours"]["num_models"] for one in mine]
            kind = mine[0]["ours"]["kind"]
            style = {
                "color": colour,
                "linestyle": LINE_STYLES.get(kind, "-"),
                "markersize": 5,
                "linewidth": 1.4,
                **look(mine[0]),
            }
            epsilons = [one["ours"]["epsilon"] for one in mine]
            if None not in epsilons:
                left.plot(counts, [float(value) for value in epsilons], **style)
            right.plot(
                counts,
                [float(one["ours"]["perplexity"]) for one in mine],
                **style,
                label=f"{name}: {promise(mine[0])}",
            )
        public = next(one["ours"]["perplexity"] for one in rows if one["method"] == PUBLIC)
        right.axhline(float(public), color=GREY, linestyle=(0, (2, 2)), linewidth=1.1, label=PUBLIC)
        left.set_yscale("log")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts)
            number_axis(axes.xaxis)
            number_axis(axes.yaxis)
            axes.set_xlabel("models N")
        left.set(title="privacy", ylabel="ε (nats)")
        right.set(title="quality", ylabel="perplexity")
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, handlelength=3)
    return Drawing(f"studies-{study}", title, f"{words} text. {_KINDS}", figure)


def _screening(rows: Sequence[Row]) -> Drawing:
    title = "What the screening bit depends on"
    with canvas(3.9, 1, 2) as (figure, (left, right)):
        places = range(len(rows))
        for name, colour, marker in (
            ("equal_bits", COLOURS[0], "o"),
            ("screened", COLOURS[1], "D"),
        ):
            parts = [
                one["ours"][name] / (1 if name == "equal_bits" else one["ours"]["queries"])
                for one in rows
            ]
            words = {"equal_bits": "same bit", "screened": "screened"}[name]
            left.plot(
                [100 * part for part in parts], places,
                color=colour, marker=marker, markersize=5, linestyle="none", label=words,
            )  # fmt: skip
        left.set_yticks(places, [one["label"] for one in rows], fontsize=_FONT_SIZE)
        left.invert_yaxis()
        left.set(title="one setting changed", xlabel="queries (%)")
        left.set_xlim(-3, 103)
        left.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, handlelength=1.2, fontsize=9
        )
        number_axis(left.xaxis)
        others = [one for one in rows if not one["label"].startswith("λ")]
        # If lines coincide, wider marks lie beneath narrower ones.
        inks = cycle((*COLOURS, GREY))
        styles = zip(inks, cycle("osD^vP*X"), cycle(("-", (0, (4, 1.6)), (0, (1, 1)))))
        for number, (one, (colour, marker, dash)) in enumerate(zip(others, styles, strict=False)):
            shares = one["ours"]["by_top_probability"]
            middles = [(i + 0.5) / len(shares) for i in range(len(shares))]
            points = [(x, 100 * y) for x, y in zip(middles, shares, strict=True) if y is not None]
            right.plot(
                [x for x, _ in points], [y for _, y in points], color=colour, marker=marker,
                markersize=max(4.0, 9.0 - number), linewidth=1.2, linestyle=dash,
                label=one["label"],
            )  # fmt: skip
        right.set(
            title="screened queries", xlabel="largest public probability", ylabel="screened (%)"
        )
        right.set_xlim(0, 1)
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=4, handlelength=2.5)
    caption = (
        "Left: the share of queries whose bit stays the same, under the same noise, if the public "
        "model replaces every private one, and the share of screened queries. Right: the share of "
        "screened queries against the public model's largest probability, for several values of "
        "noise, threshold and number of screened tokens."
    )
    return Drawing("studies-screening", title, caption, figure)


def _frontiers(rows: Sequence[Row]) -> Drawing:
    title = "Perplexity against ε, for one whole shard unless stated"
    names = list(dict.fromkeys(one["method"] for one in rows))
    with canvas(3.9 + 0.17 * len(names)) as (figure, axes):
        colours, dashes = cycle(COLOURS), cycle(DASHES)
        for name in names:
            mine = [one for one in rows if one["method"] == name]
            ours, label = [one["ours"] for one in mine], f"{name}: {promise(mine[0])}"
            if ours[0]["epsilon"] is None or ours[0]["kind"] == "public":
                level = float(ours[0]["perplexity"])
                axes.axhline(level, color=GREY, linestyle=next(dashes), linewidth=1.1, label=label)
                continue
            points = sorted((float(one["epsilon"]), float(one["perplexity"])) for one in ours)
            axes.plot(
                *zip(*(p for p in points if math.isfinite(p[0])), strict=True),
                color=next(colours), linestyle=LINE_STYLES.get(ours[0]["kind"], "-"),
                markersize=6, linewidth=1.5, label=label, **look(mine[0]),
            )  # fmt: skip
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.set(xlabel="ε (nats)", ylabel="perplexity (lower is better)")
        number_axis(axes.xaxis)
        number_axis(axes.yaxis)
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", fontsize=8)
    caption = (
        f"{_KINDS} DP-SGD's ε is for adding or removing the unit in its name. A block of text is "
        "far less than a whole topic, and a shard may hold several topics."
    )
    return Drawing("studies-frontiers", title, caption, figure)
