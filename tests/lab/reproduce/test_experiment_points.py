"""The text, the setting and the place in the figure of an experiment's line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from experiment_cases import inputs, rows_of
from fake_ensemble import FakeEnsemble
from torch import Tensor

from adapmixed.mechanisms import Mechanism
from adapmixed_lab.figures.style import canvas, draw_plane
from adapmixed_lab.reproduce.dp_adapter import DPAdapter
from adapmixed_lab.reproduce.measure import Run
from adapmixed_lab.reproduce.studies import frontiers
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


@pytest.mark.slow
def test_dp_sgd_reads_the_windows_of_the_frontier(monkeypatch: pytest.MonkeyPatch) -> None:
    given, ensemble, alone = compared(monkeypatch)
    monkeypatch.setattr(frontiers, "BUDGETS", (4.0,))
    monkeypatch.setattr(frontiers, "LEAKAGES", (0.1,))
    found = frontiers.rows(given, Run(), 40, [ADAPTER])
    assert found[-1]["method"] == "DP-SGD, one name"
    assert alone.read == ensemble.read and len(alone.read) > 1


@pytest.mark.slow
def test_the_frontier_keeps_the_best_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    every: dict[str, float] = {}
    measured = frontiers.compare

    def noted(given: Any, mechanisms: Mapping[str, Mechanism], *more: Any, **rest: Any) -> Any:
        found = measured(given, mechanisms, *more, **rest)
        every.update({name: float(str(ours["perplexity"])) for name, ours in found.items()})
        return found

    monkeypatch.setattr(frontiers, "compare", noted)
    monkeypatch.setattr(frontiers, "BUDGETS", (1.0, 8.0))
    monkeypatch.setattr(frontiers, "LEAKAGES", (0.1,))
    given = inputs(10)
    rows = frontiers.rows(given, Run(), 30, [])
    chosen: list[Any] = [one for one in rows if str(one["method"]).startswith("Clipped")]
    assert len(chosen) == 4
    for one in chosen:
        budget = " ".join(one["label"].split()[:3])  # "ε ≤ 4", then shape or scale
        settings = {
            name: perplexity
            for name, perplexity in every.items()
            if name.startswith(f"{one['method']}, {budget}, ")
        }
        assert len(settings) == len(set(settings.values())) > 1
        best = min(settings, key=lambda name: settings[name])
        assert one["ours"]["perplexity"] == settings[best]
        assert best == f"{one['method']}, {budget}, {one['label'].removeprefix(budget).strip()}"


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
