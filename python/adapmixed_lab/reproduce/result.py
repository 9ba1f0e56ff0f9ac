"""The content of a result file: everything needed to redraw its tables and figures.

    {"format_version": 1, "experiment": "table1", "inputs": {...}, "settings": {...},
     "notes": [...], "rows": [{"group", "method", "label", "ours", "paper"}, ...],
     "environment": {...}, "seconds": s}

`group` names the rows that belong together: a part of a table or a panel of a figure.
`label` is the setting if a group varies one. `ours` and `paper` may each be null. Infinities are
the string "inf". A result holds perplexities and data-dependent ε, so it is for the operator only.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adapmixed.report import environment, plain
from adapmixed.report.report import show_epsilon
from adapmixed_lab.reproduce.paper import DELTA

if TYPE_CHECKING:
    from adapmixed_lab.reproduce.inputs import Texts
    from adapmixed_lab.reproduce.measure import Run

FORMAT_VERSION = 1


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
    run: Run,
    *,
    rows: Sequence[Mapping[str, object]],
    settings: Mapping[str, object],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Collect an experiment into strict JSON values; "seconds" are since the run began."""
    content = {
        "format_version": FORMAT_VERSION,
        "experiment": experiment,
        "inputs": inputs.description(),
        "settings": {"seed": run.seed, "delta": DELTA, **settings},
        "notes": [*inputs.notes(), *notes],
        "rows": rows,
        "environment": environment(),
        "seconds": round(time.perf_counter() - run.began, 1),
    }
    result: dict[str, Any] = plain(content, "result")
    return result


def read_experiment(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        ValueError: if it is not JSON, has another format version, lacks a part, or names a data
            set that could lead out of a folder.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["format_version"] != FORMAT_VERSION:
            version = found["format_version"]
            raise ValueError(f"format_version must be {FORMAT_VERSION}, got {version!r}")
        dataset = found["inputs"]["dataset"]
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", dataset):  # it becomes a file's name
            raise ValueError(f"dataset must be a name, got {dataset!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} must be an unchanged result file: {error}") from error
    return found


def relation(side: Mapping[str, Any]) -> str | None:
    """Return the adjacency of a line's ε; DP-SGD's is of other units than shards."""
    records = side.get("adjacency") == "add_remove" and side.get("unit") not in (None, "shard")
    return "add/remove" if records else side.get("adjacency")


def run_words(result: Mapping[str, Any]) -> str:
    """Return what a result was measured on, for titles: base, text, models and settings."""
    inputs, settings = result["inputs"], result["settings"]
    where = f"{inputs['base']} on {inputs['text']}"
    trained = settings.get("trainings", 1)
    facts = [f"{trained} trainings of " * (trained > 1) + f"{inputs['num_models']} models"]
    facts += [f"{settings['queries']:,} queries"] * ("long_queries" not in settings)
    facts.append(f"settings of {inputs['dataset']}")
    return f"{where}: {', '.join(facts)}, δ = {settings['delta']:g}"
