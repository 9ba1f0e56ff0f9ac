"""Figure 2: one setting of AdaPMixED varied at a time, ours with the paper's points."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.ticker import LogLocator

from adapmixed.files import write_file
from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.figures.style import COLOURS, GREY, MARKERS, DrawnFigure, canvas, number_axis
from adapmixed_lab.reproduce import paper
from adapmixed_lab.reproduce.measure import Texts, compare
from adapmixed_lab.reproduce.published import PaperRule
from adapmixed_lab.reproduce.result import build_result, row, run_words

MODELS = "models N"  # the panel whose settings are sub-ensembles


Settings = dict[str, PaperRule]
"""What answers at each of our points of a panel, by labels that are written as the paper's are."""


def sizes(num_models: int) -> tuple[int, ...]:
    """Return the sizes to compare: those of the list below `num_models`, then `num_models`."""
    return (*(n for n in (8, 16, 32, 64, 80, 100, 128) if n < num_models), num_models)


def settings_of(preset: PaperRule, num_models: int) -> dict[str, Settings]:
    """Return, by panel, the paper's values, and the preset's value if it is not among them.

    Numbers of models are those that the first members of the ensemble can give.
    """
    panels = {}
    for panel in paper.FIGURE_2:
        points = {point.label: point.setting for point in panel.points}
        if panel.title == MODELS:
            counts = {str(n): n if n < num_models else None for n in sizes(num_models)}
            panels[panel.letter] = {label: replace(preset, count=n) for label, n in counts.items()}
            continue
        values = {name: getattr(preset, name) for name in panel.points[0].setting}
        if values not in points.values():
            points["/".join(f"{value:g}" for value in values.values())] = values
        ordered: Any = sorted(points.items(), key=lambda item: tuple(item[1].values()))
        panels[panel.letter] = {label: replace(preset, **changes) for label, changes in ordered}
    return panels


def figure2(inputs: Texts, *, queries: int = paper.RUN_QUERIES) -> dict[str, Any]:
    """Run Figure 2: every setting answers the same logits, and equal settings run once.

    Args:
        inputs: models and text.
        queries: answered with every setting.

    Raises:
        ValueError: if the text is too short.
    """
    preset = PaperRule(
        **vars(AdaPMixED.preset(inputs.sources.dataset)) | {"adjacency": "add_remove"}
    )
    points = settings_of(preset, inputs.ensemble.num_models)
    # The preset is a point of every panel, and runs once.
    compared = {repr(rule): rule for settings in points.values() for rule in settings.values()}
    ours = compare(inputs, compared, queries, state="figure2")
    references = [name for name in ours if name not in compared]
    rows: list[dict[str, Any]] = [row(name, ours[name], group="references") for name in references]
    with_paper = inputs.sources.paper and inputs.sources.dataset == paper.FIGURE_2_DATASET
    for panel in paper.FIGURE_2:
        lines = {label: ours[repr(rule)] for label, rule in points[panel.letter].items()}
        rows += _panel_rows(panel, lines, preset.order, with_paper=with_paper)
    panels = {
        panel.letter: {"title": panel.title, **_anchors(panel, points[panel.letter], preset)}
        for panel in paper.FIGURE_2
    }
    chosen = {"queries": queries, "preset": repr(preset), "panels": panels}
    notes = []
    if inputs.sources.paper and not with_paper:
        covered = paper.FIGURE_2_DATASET
        notes.append(f"The paper's Figure 2 covers {covered} alone, so no points of it are shown.")
    return build_result("figure2", inputs, rows=rows, settings=chosen, notes=notes)


def _panel_rows(
    panel: paper.Panel, ours: Mapping[str, Mapping[str, object]], order: float, *, with_paper: bool
) -> list[dict[str, Any]]:
    """Return a line for every setting of ours or of the paper, in order."""
    printed = {
        point.label: {
            "perplexity": point.perplexity,
            "epsilon": point.epsilon,
            "kind": "data-dependent, ex-post",
            "queries": None,
            # Not printed, but it follows from order and δ; the rest of ε was spent.
            "conversion": c_alpha(point.setting.get("order", order), paper.DELTA),
            "place": f"Figure 2{panel.letter} (fig:ablation)",
        }
        for point in panel.points
        if with_paper
    }
    labels = [*ours, *(label for label in printed if label not in ours)]
    return [
        row(paper.ADAPMIXED, ours.get(label), printed.get(label), group=panel.letter, label=label)
        for label in labels
    ]


def _anchors(panel: paper.Panel, settings: Settings, preset: PaperRule) -> dict[str, str]:
    """Return "anchor", the label of our preset, and "paper_anchor", the same or the paper's."""
    anchor = next(label for label, rule in settings.items() if rule == preset)
    same = any(point.label == anchor for point in panel.points)
    return {"anchor": anchor, "paper_anchor": anchor if same else panel.anchor}


_FONT_SIZE = 7.5
_SAME = 0.07  # part of the axes: points nearer than this share one label
_WIDE = 4.0  # ratio of multiples above which their axis is logarithmic
_FAR = 0.005  # multiples below this are named and not drawn, or they would squeeze all others
_TITLE = "Figure 2: one setting of AdaPMixED at a time"
_COLOUR = {"ours": COLOURS[0], "paper": COLOURS[1]}

_Point = tuple[str, float, float]


def write_outputs(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write EXPERIMENT-DATASET.json, and of Figure 2 also .svg and .pdf.

    The figure follows from the JSON alone.

    Returns:
        the paths of the files.
    """
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    files = {".json": f"{text}\n".encode()}
    if result["experiment"] == "figure2":
        drawing = draw_panels(result)
        files |= {".svg": f"{drawing.svg}\n".encode(), ".pdf": drawing.pdf}
    stem = f"{result['experiment']}-{result['inputs']['dataset']}"
    for suffix, content in files.items():
        write_file(folder / f"{stem}{suffix}", content)
    return [folder / f"{stem}{suffix}" for suffix in files]


def draw_panels(result: Mapping[str, Any]) -> DrawnFigure:
    """Draw six panels of labelled points: relative spent ε to the right, perplexity upwards."""
    panels = result["settings"]["panels"]
    handles: dict[str, Any] = {}
    with canvas(6.2, 2, 3) as (figure, grid):
        for axes, (letter, panel) in zip(grid.flat, panels.items(), strict=True):
            rows = [entry for entry in result["rows"] if entry["group"] == letter]
            shown = {
                "ours": relative(rows, "ours", panel["anchor"]),
                "paper": relative(rows, "paper", panel["paper_anchor"]),
            }
            far = [word for points in shown.values() for word, x, _ in points if x < _FAR]
            near = {side: [p for p in points if p[1] >= _FAR] for side, points in shown.items()}
            left = f"\nfar to the left: {', '.join(far)}" if far else ""
            axes.set_title(f"({letter}) {panel['title']}{left}", fontsize=9, pad=5)
            axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
            axes.axvline(1, color=GREY, linewidth=0.8, zorder=0)
            for side, points in near.items():
                if points:
                    handles[side] = _draw(axes, points, side)
            _scale(axes, [x for points in near.values() for _, x, _ in points])
            axes.autoscale_view()  # labels ask for places
            for side, points in near.items():
                _label(axes, points, side)
        below = "ε without its conversion (f: with it), as a multiple of the reference's"
        grid[-1][1].set_xlabel(below, fontsize=9)
        figure.supylabel("change of perplexity (%)", fontsize=9)
        names = {"ours": "this run", "paper": "the paper, N = 100 (both ε ex-post)"}
        figure.legend(
            handles.values(), [names[side] for side in handles],
            loc="outside lower center", ncols=2, handlelength=2.5,
        )  # fmt: skip
    return DrawnFigure("figure2", _TITLE, "", figure, run_words(result))


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
    sides = {entry["label"]: entry[side] for entry in rows if entry[side] is not None}
    if not sides:
        return []
    conversions = {label: float(value["conversion"]) for label, value in sides.items()}
    moved = max(conversions.values()) - min(conversions.values()) > 1e-9
    spent = {
        label: float(value["epsilon"]) - (0.0 if moved else conversions[label])
        for label, value in sides.items()
    }
    base = float(sides[anchor]["perplexity"])
    if not (0 < spent[anchor] < math.inf and base < math.inf):
        return []
    points = [
        (label, spent[label] / spent[anchor], 100 * (float(value["perplexity"]) / base - 1))
        for label, value in sides.items()
    ]
    return [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]


def _scale(axes: Any, multiples: Sequence[float]) -> None:
    """Set a logarithmic axis if the multiples lie far apart, and leave room for the labels."""
    low, high = min(multiples), max(multiples)
    if low > 0 and high > _WIDE * low:
        axes.set_xscale("log")
        within = (1.0, 2.0, 5.0) if high < 30 * low else (1.0,)
        axes.xaxis.set_major_locator(LogLocator(subs=within, numticks=5))
    axes.margins(0.2, 0.25)
    axes.tick_params(labelsize=_FONT_SIZE)
    number_axis(axes.xaxis)
    number_axis(axes.yaxis)


def _label(axes: Any, points: Sequence[_Point], side: str) -> None:
    """Write each point's word next to it; points that lie on one another share a label."""
    groups: list[tuple[list[str], tuple[float, float], Any]] = []
    for word, x, y in points:
        here = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        near = next((g for g in groups if math.dist(g[2], here) < _SAME), None)
        groups.append(([word], (x, y), here)) if near is None else near[0].append(word)
    place = ((4, 3), "left", "bottom") if side == "ours" else ((-4, -3), "right", "top")
    for words, at, _ in groups:
        axes.annotate(
            " · ".join(words), at, place[0], textcoords="offset points", ha=place[1],
            va=place[2], fontsize=_FONT_SIZE, color=_COLOUR[side],
        )  # fmt: skip


def _draw(axes: Any, points: Sequence[_Point], side: str) -> Any:
    """Draw the line of one side with its reference ringed, and return its legend handle."""
    dash, fill = ("-", "full") if side == "ours" else ((0, (2, 1.5)), "none")
    (line,) = axes.plot(
        *zip(*(at for _, *at in points), strict=True), color=_COLOUR[side], linestyle=dash,
        linewidth=0.9, marker=MARKERS["data-dependent, ex-post"], markersize=4.5, fillstyle=fill,
    )  # fmt: skip
    axes.plot(1, 0, "o", color=_COLOUR[side], fillstyle="none", markersize=9)
    return line
