"""Figure 2: one setting of AdaPMixED varied at a time, ours with the paper's points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from adapmixed.mechanisms import AdaPMixED, Mechanism
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.reproduce import paper
from adapmixed_lab.reproduce.measure import Texts, compare
from adapmixed_lab.reproduce.published import PaperRule
from adapmixed_lab.reproduce.result import build_result, row

MODELS = "models N"  # the panel whose settings are sub-ensembles


Settings = dict[str, PaperRule]
"""What answers at each of our points of a panel, by labels that are written as the paper's are."""


def sizes(num_models: int) -> tuple[int, ...]:
    """Return the sizes to compare: those of the list below `num_models`, then `num_models`."""
    return (*(n for n in (8, 16, 32, 64, 80, 100, 128) if n < num_models), num_models)


def settings_of(preset: AdaPMixED, num_models: int) -> dict[str, Settings]:
    """Return, by panel, the paper's values, and the preset's value if it is not among them.

    Numbers of models are those that the first members of the ensemble can give.
    """
    found = {}
    for panel in paper.FIGURE_2:
        points = {point.label: point.setting for point in panel.points}
        if panel.title == MODELS:
            counts = {str(n): n if n < num_models else None for n in sizes(num_models)}
            found[panel.letter] = {label: PaperRule(preset, n) for label, n in counts.items()}
            continue
        own = {name: getattr(preset, name) for name in panel.points[0].setting}
        if own not in points.values():
            points["/".join(f"{value:g}" for value in own.values())] = own
        ordered: Any = sorted(points.items(), key=lambda item: tuple(item[1].values()))
        found[panel.letter] = {
            label: PaperRule(replace(preset, **changes)) for label, changes in ordered
        }
    return found


def figure2(inputs: Texts, *, queries: int = paper.RUN_QUERIES) -> dict[str, Any]:
    """Run Figure 2: every setting answers the same logits, and equal settings run once.

    Args:
        inputs: models and text.
        queries: answered with every setting.

    Raises:
        ValueError: if the text is too short.
    """
    preset = replace(AdaPMixED.preset(inputs.sources.dataset), adjacency="add_remove")
    points = settings_of(preset, inputs.ensemble.num_models)
    # The preset is a point of every panel, and runs once.
    distinct: dict[Mechanism, str] = {}
    for letter, settings in points.items():
        for label, mechanism in settings.items():
            distinct.setdefault(mechanism, f"{letter}: {label}")
    compared = {name: mechanism for mechanism, name in distinct.items()}
    ours = compare(inputs, compared, queries, state="figure2")
    references = [name for name in ours if name not in compared]
    rows: list[dict[str, Any]] = [row(name, ours[name], group="references") for name in references]
    for panel in paper.FIGURE_2:
        found = {label: ours[distinct[one]] for label, one in points[panel.letter].items()}
        with_paper = inputs.sources.paper and inputs.sources.dataset == paper.FIGURE_2_DATASET
        rows += _panel_rows(panel, found, preset.order, with_paper=with_paper)
    panels = {
        panel.letter: {
            "title": panel.title,
            **_anchors(panel, points[panel.letter], preset),
            "remark": panel.remark,
        }
        for panel in paper.FIGURE_2
    }
    chosen = {"queries": queries, "rule": "paper", "preset": repr(preset), "panels": panels}
    notes = [*_notes(inputs, rows), *_trend_notes(rows)]
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
            "place": panel.place,
        }
        for point in panel.points
        if with_paper
    }
    labels = [*ours, *(label for label in printed if label not in ours)]
    return [
        row(paper.ADAPMIXED, ours.get(label), printed.get(label), group=panel.letter, label=label)
        for label in labels
    ]


def _anchors(panel: paper.Panel, settings: Settings, preset: AdaPMixED) -> dict[str, str]:
    """Return the reference of a panel: the preset, or a number of models that both sides have.

    Returns:
        "anchor", the label of ours, and "paper_anchor", the paper's.
    """
    if panel.title != MODELS:
        anchor = next(label for label, one in settings.items() if one == PaperRule(preset))
        return {"anchor": anchor, "paper_anchor": panel.anchor}
    printed = [point.label for point in panel.points]
    common = [label for label in settings if label in printed]
    if not common:
        return {"anchor": [*settings][-1], "paper_anchor": panel.anchor}
    return {"anchor": common[-1], "paper_anchor": common[-1]}


def _notes(inputs: Texts, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [
        "Every panel is drawn relative to its reference setting (ringed), as multiples of its ε "
        "and changes of its perplexity. ε is drawn without its conversion from Rényi divergence, "
        "which α alone moves. The panel that varies α includes the conversion.",
        "ε follows the paper's rule. Our smaller ensembles are the first members of the whole one, "
        "whose shards keep their size. The paper distributes all text over fewer, larger shards.",
    ]
    if inputs.sources.paper:
        if inputs.sources.dataset != (covered := paper.FIGURE_2_DATASET):
            notes.append(
                f"The paper's Figure 2 covers {covered} alone, so no points of it are shown."
            )
        notes += [panel.remark for panel in paper.FIGURE_2 if panel.remark]
    titles = {panel.letter: panel.title for panel in paper.FIGURE_2}
    screened = [
        f"({one['group']}) {titles[one['group']]} {one['label']}"
        for one in rows
        if one["group"] in titles
        and one["ours"]
        and one["ours"]["screened"] == one["ours"]["queries"]
    ]
    if screened:
        where = ", ".join(screened)
        notes.append(f"Every query is screened, and answered by the public model, at {where}.")
    return notes


def _trend_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return notes that name the panels in which ε or perplexity moves against the paper."""
    notes = []
    for panel in paper.FIGURE_2:
        here = [one for one in rows if one["group"] == panel.letter]
        for name, words, least in (("epsilon", "ε", 0.01), ("perplexity", "perplexity", 0.001)):
            sides = [_trend(here, side, name) for side in ("ours", "paper")]
            changes = [0.0 if side is None else side[2] for side in sides]
            if min(map(abs, changes)) < least or changes[0] * changes[1] > 0:
                continue
            moves = [
                f"{'rises' if change > 0 else 'falls'} by {abs(change):.1%} from {first} to {last}"
                for first, last, change in filter(None, sides)
            ]
            notes.append(
                f"The paper's trend does not appear in ({panel.letter}) {panel.title}: {words} "
                f"{moves[0]}, in the paper it {moves[1]}."
            )
    return notes


def _trend(
    rows: Sequence[Mapping[str, Any]], side: str, name: str
) -> tuple[str, str, float] | None:
    """Return (first label, last label, relative change) of one side of a panel, or None.

    If both sides share several labels, only shared labels count.
    """
    shared = [one for one in rows if one["ours"] and one["paper"]]
    points = shared if len(shared) > 1 else [one for one in rows if one[side]]
    if len(points) < 2:
        return None
    first, last = (float(one[side][name]) for one in (points[0], points[-1]))
    return points[0]["label"], points[-1]["label"], last / first - 1
