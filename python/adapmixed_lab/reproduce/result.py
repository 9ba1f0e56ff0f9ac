"""The content of a result file, all that is needed to redraw its tables and figures, and its text.

    {"format_version": 3, "experiment": "table1", "inputs": {...}, "settings": {...},
     "notes": [...], "rows": [{"group", "method", "label", "ours", "paper"}, ...],
     "environment": {...}}

`group` names the rows that belong together: a part of a table or a panel of a figure.
`label` is the setting if a group varies one. `ours` and `paper` may each be null. Infinities are
the string "inf". A result holds perplexities and data-dependent ε, so it is for the operator only.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.ensemble.members import read_versioned
from adapmixed.evaluation.report import (
    INTERVAL_WORDS,
    KIND_LABELS,
    MISSING,
    aligned,
    environment,
    format_against,
    format_neighbours,
    format_perplexity,
    plain,
    printable,
    show_epsilon,
)
from adapmixed_lab.reproduce.paper import DELTA

if TYPE_CHECKING:
    from adapmixed_lab.reproduce.measure import Texts

FORMAT_VERSION = 3


def row(
    method: str,
    ours: Mapping[str, object] | None,
    paper: Mapping[str, object] | None = None,
    *,
    group: str = "",
    label: str = "",
) -> dict[str, object]:
    """Return one line of a result."""
    return {"group": group, "method": method, "label": label, "ours": ours, "paper": paper}


def show_cost(side: Mapping[str, Any], part: str = "epsilon") -> str:
    """Format ε or a part of it: ours rounded up, as in the guarantee, the paper's as printed."""
    value = float(side[part])
    return f"{value:g}" if "place" in side else show_epsilon(value)


def build_result(
    experiment: str,
    inputs: Texts,
    *,
    rows: Sequence[Mapping[str, object]],
    settings: Mapping[str, object],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Collect an experiment into strict JSON values."""
    content = {
        "format_version": FORMAT_VERSION,
        "experiment": experiment,
        "inputs": inputs.description(),
        "settings": {"seed": inputs.seed, "delta": DELTA, **settings},
        "notes": [*inputs.notes(), *notes],
        "rows": rows,
        "environment": environment(),
    }
    result: dict[str, Any] = plain(content, "result")
    return result


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ValueError, KeyError, TypeError: if it is not JSON, has another format version, lacks a
            part, or names a data set that could lead out of a folder.
    """
    result = read_versioned(path, FORMAT_VERSION, "inputs")
    dataset = result["inputs"]["dataset"]
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", dataset):  # it becomes a file's name
        raise ValueError(f"dataset must be a name, got {dataset!r}")
    return result


def run_words(result: Mapping[str, Any]) -> str:
    """Return what a result was measured on, for titles: base, text, models and settings."""
    inputs, settings = result["inputs"], result["settings"]
    where = f"{inputs['base']} on {inputs['text']}"
    trained = settings.get("trainings", 1)
    facts = [f"{trained} trainings of " * (trained > 1) + f"{inputs['num_models']} models"]
    facts += [f"{settings['queries']:,} queries"] * ("long_queries" not in settings)
    facts.append(f"settings of {inputs['dataset']}")
    return f"{where}: {', '.join(facts)}, δ = {settings['delta']:g}"


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
    groups = list(dict.fromkeys(entry["group"] for entry in result["rows"]))
    for group in groups:
        rows = [entry for entry in result["rows"] if entry["group"] == group]
        heading = [group] if group else []
        if panel := result["settings"].get("panels", {}).get(group):
            heading = [f"({group}) {panel['title']}"]
        lines += ["", *heading, *_table(rows)]
        if any(_has_parts(entry["paper"]) for entry in rows):
            lines += ["", "Parts of ε:", *_breakdown(rows)]
    lines.append("")
    pairs = [INTERVAL_WORDS] * ("trainings" not in result["settings"])
    for note in [KINDS, *pairs, *result["notes"]]:
        lines += textwrap.wrap(note, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(map(printable, lines))


def _table(rows: Sequence[Row]) -> list[str]:
    sides = [entry[side] for entry in rows for side in ("ours", "paper") if entry[side]]
    shown = {"screened": any(float(side.get("screened") or 0.0) for side in sides)}
    shown["vs public"] = any(side.get("difference") for side in sides)
    columns = [(title, *how) for title, how in _COLUMNS.items() if shown.get(title, True)]
    title, key = ("setting", "label") if rows[0]["label"] else ("method", "method")
    cells = [[title], *([entry[key]] for entry in rows)]
    numbers = [False]
    for side in ("ours", "paper") if any(entry["paper"] for entry in rows) else ("ours",):
        values = [entry[side] or {} for entry in rows]
        for title, field, number, show in columns:
            if side == "paper" and title not in _PAPER:
                continue
            name = "paper: ε" if side == "paper" and title == "ε" else title
            words = [MISSING if value.get(field) is None else show(value) for value in values]
            cells = [[*line, cell] for line, cell in zip(cells, [name, *words], strict=True)]
            numbers.append(number)
    return aligned(cells, numbers)


def _breakdown(rows: Iterable[Row]) -> list[str]:
    cells = [["method", *_PARTS]]
    for entry in rows:
        for side, name in (("ours", entry["method"]), ("paper", f"{entry['method']} (paper)")):
            if _has_parts(entry[side]):
                cells.append([name, *(show_cost(entry[side], part) for part in _PARTS)])
    return aligned(cells, [False, True, True, True, True])


def _has_parts(side: Mapping[str, Any] | None) -> bool:
    return side is not None and all(side.get(part) is not None for part in _PARTS)


def _epsilon(side: Mapping[str, Any]) -> str:
    deviation = side.get("epsilon_deviation")
    return show_cost(side) + (f" ± {float(deviation):.2g}" if deviation else "")


def _perplexity(side: Mapping[str, Any]) -> str:
    deviation = side.get("perplexity_deviation") if "place" in side else None
    spread = "" if deviation is None else f" ± {float(deviation):.2f}"
    return format_perplexity(float(side["perplexity"])) + spread


def _screened(side: Mapping[str, Any]) -> str:
    count = float(side["screened"])
    return f"{count:,.4g}" if count < 1e4 else f"{count:,.0f}"


_COLUMNS: Mapping[str, tuple[str, bool, Callable[[Mapping[str, Any]], str]]] = {
    "ε": ("epsilon", True, _epsilon),
    "perplexity": ("perplexity", True, _perplexity),
    "vs public": ("difference", True, lambda side: format_against(None, side["difference"])),
    "screened": ("screened", True, _screened),
    "guarantee": ("kind", False, lambda side: KIND_LABELS.get(side["kind"], side["kind"])),
    "neighbours": ("adjacency", False, lambda side: format_neighbours(side["adjacency"])),
    "of one": ("adjacency", False, lambda side: str(side["unit"])),
}
"""The field without which a cell is empty, whether cells are numbers, and the cell of a side."""
_PAPER = ("ε", "perplexity", "screened", "guarantee")
