"""Studies that the paper lacks: the number of models, what screening depends on, frontiers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from adapmixed.experiments.dp_adapter import DPAdapter
from adapmixed.experiments.inputs import Inputs
from adapmixed.experiments.measure import Run
from adapmixed.experiments.paper import DELTA, RUN_QUERIES
from adapmixed.experiments.result import build_result
from adapmixed.experiments.studies import frontiers, models, screening

STUDIES = (models, screening, frontiers)


def studies(
    inputs: Inputs, run: Run, adapters: Sequence[DPAdapter] = (), *, queries: int = RUN_QUERIES
) -> dict[str, Any]:
    """Runs all of them over the same queries.

    Args:
        inputs: models and text.
        run: seed, state, progress.
        adapters: DP-SGD adapters that join the frontiers.
        queries: answered with every setting.

    Raises:
        ValueError: the text is too short.
    """
    started = time.perf_counter()
    rows = models.rows(inputs, run, queries)
    rows += screening.rows(inputs, run, queries)
    rows += frontiers.rows(inputs, run, queries, adapters)
    return build_result(
        "studies",
        rows,
        inputs=inputs.description(),
        settings={
            "queries": queries,
            "seed": run.seed,
            "delta": DELTA,
            "titles": {study.GROUP: study.TITLE for study in STUDIES},
        },
        notes=[*inputs.notes(), *(study.NOTE for study in STUDIES)],
        seconds=time.perf_counter() - started,
    )
