"""A result as text for a terminal: our numbers next to the paper's, then the notes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from adapmixed.report import aligned
from adapmixed.report.table import printable
from adapmixed.report.view import (
    INTERVAL_WORDS,
    KIND_LABELS,
    MISSING,
    format_against,
    format_neighbours,
    format_perplexity,
)
from adapmixed_lab.reproduce.result import relation, run_words, show_cost

_WIDTH = 100
_PARTS = ("mixing", "screening", "conversion", "total")
_TITLES = {
    "table1": "Table 1: perplexity and privacy",
    "table2": "Table 2: screening and data-dependent analysis",
    "figure2": "Figure 2: one setting of AdaPMixED varied at a time",
}
KINDS = (
    "Guarantees: 'fixed' holds in advance and may be published. 'data-dependent, ex-post' depends "
    "on the private data, is for the operator only, and is no (ε, δ) guarantee with a constant ε. "
    "'published, invalid' is the claim of an invalid bound and no guarantee."
)

Row = Mapping[str, Any]


def text(result: Mapping[str, Any]) -> str:
    """Return the tables of a result and its notes; ε is in nats, and "-" is a missing number."""
    lines = [_TITLES[result["experiment"]], run_words(result)]
    groups = list(dict.fromkeys(one["group"] for one in result["rows"]))
    for group in groups:
        rows = [one for one in result["rows"] if one["group"] == group]
        lines += ["", *_heading(result, group), *_table(rows)]
        if any(_has_parts(one["paper"]) for one in rows):
            lines += ["", "Parts of ε:", *_breakdown(rows)]
    lines.append("")
    pairs = [INTERVAL_WORDS] * ("trainings" not in result["settings"])
    for note in [KINDS, *pairs, *result["notes"]]:
        lines += textwrap.wrap(note, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(map(printable, lines))


def _heading(result: Mapping[str, Any], group: str) -> list[str]:
    settings = result["settings"]
    if group in settings.get("panels", {}):
        return [f"({group}) {settings['panels'][group]['title']}"]
    return [group] if group else []


def _table(rows: Sequence[Row]) -> list[str]:
    labelled = any(one["label"] for one in rows)
    compared = any(one["paper"] for one in rows)
    screened = any(_count(one, side) for one in rows for side in ("ours", "paper"))
    columns: list[tuple[str, bool, Any]] = [
        ("setting", False, lambda one: one["label"])
        if labelled and len({one["method"] for one in rows}) == 1
        else ("method", False, lambda one: f"{one['method']} {one['label']}".strip()),
        ("ε", True, lambda one: _epsilon(one["ours"])),
        ("perplexity", True, lambda one: _perplexity(one["ours"])),
    ]
    if any((one["ours"] or {}).get("difference") for one in rows):
        columns.append(("vs public", True, lambda one: _against(one["ours"])))
    if screened:
        columns.append(("screened", True, lambda one: _screened(one, "ours")))
    columns += [
        ("guarantee", False, lambda one: _kind(one["ours"])),
        ("neighbours", False, lambda one: format_neighbours(relation(one["ours"] or {}))),
        ("of one", False, lambda one: _unit(one["ours"])),
    ]
    if compared:
        columns += [
            ("paper: ε", True, lambda one: _epsilon(one["paper"])),
            ("perplexity", True, lambda one: _perplexity(one["paper"])),
        ]
        if screened:
            columns.append(("screened", True, lambda one: _screened(one, "paper")))
        columns.append(("guarantee", False, lambda one: _kind(one["paper"])))
    cells = [[title for title, _, _ in columns]]
    cells += [[str(show(one)) for _, _, show in columns] for one in rows]
    return aligned(cells, [number for _, number, _ in columns])


def _breakdown(rows: Iterable[Row]) -> list[str]:
    cells = [["method", *_PARTS]]
    for one in rows:
        for side, name in (("ours", one["method"]), ("paper", f"{one['method']} (paper)")):
            if _has_parts(one[side]):
                cells.append([name, *(show_cost(one[side], part) for part in _PARTS)])
    return aligned(cells, [False, True, True, True, True])


def _has_parts(side: Mapping[str, Any] | None) -> bool:
    return side is not None and all(side.get(part) is not None for part in _PARTS)


def _epsilon(side: Mapping[str, Any] | None) -> str:
    if side is None or side.get("epsilon") is None:
        return MISSING
    deviation = side.get("epsilon_deviation")
    spread = f" ± {float(deviation):.2g}" if deviation else ""
    return show_cost(side) + spread


def _perplexity(side: Mapping[str, Any] | None) -> str:
    if side is None or side.get("perplexity") is None:
        return MISSING
    deviation = side.get("perplexity_deviation") if "place" in side else None
    spread = "" if deviation is None else f" ± {float(deviation):.2f}"
    return format_perplexity(float(side["perplexity"])) + spread


def _against(side: Mapping[str, Any] | None) -> str:
    return MISSING if side is None else format_against(None, side.get("difference"))


def _count(one: Row, side: str) -> float:
    found = one[side]
    return 0.0 if found is None or found.get("screened") is None else float(found["screened"])


def _screened(one: Row, side: str) -> str:
    found = one[side]
    if found is None or found.get("screened") is None:
        return MISSING
    return f"{_count(one, side):,.4g}" if _count(one, side) < 1e4 else f"{_count(one, side):,.0f}"


def _kind(side: Mapping[str, Any] | None) -> str:
    return MISSING if side is None else KIND_LABELS.get(side["kind"], side["kind"])


def _unit(side: Mapping[str, Any] | None) -> str:
    if side is None or side["kind"] in ("public", "none"):
        return MISSING
    return str(side["unit"])
