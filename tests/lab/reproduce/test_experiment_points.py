"""The text of an experiment's line, and its place in the figure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiment_cases import inputs, rows_of
from fake_ensemble import FakeEnsemble
from torch import Tensor

from adapmixed_lab.reproduce.dp_adapter import WHOLE_NAME, DPAdapter
from adapmixed_lab.reproduce.measure import Run
from adapmixed_lab.reproduce.table1 import parts_of, table1

ADAPTER = DPAdapter(Path("dp"), 7.5, 1e-5, "name", "The adapter is ...")


class Reading(FakeEnsemble):
    """An ensemble that records every sequence that it is asked about."""

    def __init__(self, models: int) -> None:
        super().__init__(models, spread=0.3, max_positions=32)
        self.read: list[list[list[int]]] = []

    def iter_logits(
        self, ids: Tensor, *, memory_bytes: int, **others: Any
    ) -> Iterator[tuple[slice, Tensor, Tensor, None]]:
        self.read.append(ids.tolist())
        yield from super().iter_logits(ids, memory_bytes=memory_bytes)


def compared(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Reading, Reading]:
    """Return inputs, their ensemble, and the ensemble of the adapter."""
    ensemble, alone = Reading(3), Reading(1)
    given = inputs()
    assert given.pool is not None  # chosen now, on other text
    object.__setattr__(given, "ensemble", ensemble)
    monkeypatch.setattr(DPAdapter, "load", lambda self, sources: alone)
    return given, ensemble, alone


def test_dp_sgd_reads_the_windows_of_table_1(monkeypatch: pytest.MonkeyPatch) -> None:
    given, ensemble, alone = compared(monkeypatch)
    result = table1(given, [ADAPTER], Run(), parts_of(given, 2, 40, 70))
    assert len(rows_of(result, WHOLE_NAME)) == 2
    assert alone.read == ensemble.read and len(alone.read) > 3
    # An adapter that is the public model has its perplexities: the labels are the same, too.
    alone._members.zero_()
    again = table1(given, [ADAPTER], Run(), parts_of(given, 2, 40, 70))
    for group in ("2 runs of 40 queries", "one run of 70 queries"):
        ours = {one["method"]: one["ours"] for one in again["rows"] if one["group"] == group}
        assert ours[WHOLE_NAME]["perplexities"] == pytest.approx(
            ours["public model"]["perplexities"], rel=1e-9
        )
