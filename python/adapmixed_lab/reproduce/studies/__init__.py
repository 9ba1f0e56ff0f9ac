"""Studies that the paper does not have: models and shards, screening, and frontiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapmixed_lab.reproduce.dp_adapter import UNSEEDED, DPAdapter
from adapmixed_lab.reproduce.inputs import Inputs
from adapmixed_lab.reproduce.measure import Run
from adapmixed_lab.reproduce.paper import DELTA, RUN_QUERIES
from adapmixed_lab.reproduce.result import build_result
from adapmixed_lab.reproduce.studies import frontiers, models, screening, shards

STUDIES = (models, shards, screening, frontiers)


def studies(
    inputs: Inputs,
    run: Run,
    adapters: Sequence[DPAdapter] = (),
    *,
    divided: Sequence[Path] = (),
    queries: int = RUN_QUERIES,
) -> dict[str, Any]:
    """Run all studies over the same queries.

    Args:
        inputs: models and text.
        run: seed, state and progress.
        adapters: DP-SGD adapters that join the frontiers.
        divided: ensemble folders over the same text in shards of other sizes; without any, that
            study is left out. The largest also serves the study of the number of models, if it has
            more members.
        queries: answered with every setting.

    Raises:
        ValueError: if the text is too short.
    """
    started = time.perf_counter()
    rows = models.rows(inputs, run, queries, divided)
    rows += shards.rows(inputs, run, queries, divided)
    rows += screening.rows(inputs, run, queries)
    rows += frontiers.rows(inputs, run, queries, adapters)
    made = [study for study in STUDIES if any(one["group"] == study.GROUP for one in rows)]
    return build_result(
        "studies",
        rows,
        inputs=inputs.description(),
        settings={
            "queries": queries,
            "seed": run.seed,
            "delta": DELTA,
            "titles": {study.GROUP: study.TITLE for study in made},
        },
        notes=[*inputs.notes(), *(study.NOTE for study in made), *([UNSEEDED] if adapters else [])],
        seconds=time.perf_counter() - started,
    )
