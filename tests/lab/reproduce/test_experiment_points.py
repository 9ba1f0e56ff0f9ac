"""The text of an experiment's line, and its place in the figure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from experiment_cases import inputs, rows_of
from fake_ensemble import FakeEnsemble
from torch import Tensor

from adapmixed_lab.figures.style import canvas, draw_plane
from adapmixed_lab.reproduce.dp_adapter import DPAdapter
from adapmixed_lab.reproduce.measure import Run
from adapmixed_lab.reproduce.table1 import DP_SGD, table1

ADAPTER = DPAdapter(Path("dp"), 7.5, 1e-5, "name", "The adapter is ...")


class Reading(FakeEnsemble):
    """An ensemble that records every sequence that it is asked about."""

    def __init__(self, models: int) -> None:
        super().__init__(models, spread=0.3, max_positions=32)
        self.read: list[list[list[int]]] = []

    def iter_logits(
        self, ids: Tensor, *, memory_bytes: int, room: object = None
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        self.read.append(ids.tolist())
        yield from super().iter_logits(ids, memory_bytes=memory_bytes)


def compared(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Reading, Reading]:
    """Return inputs, their ensemble, and the ensemble of the adapter."""
    ensemble, alone = Reading(3), Reading(1)
    given = inputs()
    object.__setattr__(given, "ensemble", ensemble)
    monkeypatch.setattr(DPAdapter, "load", lambda self, sources: alone)
    return given, ensemble, alone


def test_dp_sgd_reads_the_windows_of_table_1(monkeypatch: pytest.MonkeyPatch) -> None:
    given, ensemble, alone = compared(monkeypatch)
    result = table1(given, ADAPTER, Run(), runs=2, queries=40, long=70)
    assert len(rows_of(result, DP_SGD)) == 2
    assert alone.read == ensemble.read and len(alone.read) > 3
    # An adapter that is the public model has its perplexities: the labels are the same, too.
    alone._members.zero_()
    again = table1(given, ADAPTER, Run(), runs=2, queries=40, long=70)
    for group in ("2 runs of 40 queries", "one run of 70 queries"):
        ours = {one["method"]: one["ours"] for one in again["rows"] if one["group"] == group}
        assert ours[DP_SGD]["perplexities"] == pytest.approx(
            ours["public model"]["perplexities"], rel=1e-9
        )


@pytest.mark.parametrize("epsilons", [(1.0, 2.042, 2.042, 2.042, 5.0), (0.01, 5.0, 5.0)])
def test_marks_stand_at_their_epsilon(epsilons: tuple[float, ...]) -> None:
    """Axes are linear or logarithmic, and marks that meet differ in size, not in place."""
    marks = [(x, 10.0 + x, (10.0, 12.0 + x), {"marker": "o"}) for x in epsilons]
    with canvas(3.0) as (_, axes):
        draw_plane(axes, marks, [(11.0, {})])
        found = [line for line in axes.lines if line.get_marker() == "o"]
    places = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in found]
    assert places == [(x, y) for x, y, *_ in marks]
    assert axes.get_xscale() == ("log" if epsilons[0] < 0.1 else "linear")
    assert axes.get_xlim()[0] < epsilons[0] and epsilons[-1] < axes.get_xlim()[1]
    together = [line.get_markersize() for line, x in zip(found, epsilons, strict=True) if x > 2]
    assert together[:2] == sorted(set(together[:2]), reverse=True)  # a rim of each is seen
