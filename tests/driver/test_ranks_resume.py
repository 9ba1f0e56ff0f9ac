"""An evaluation over ranks that is killed goes on from its result file, over as many ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_cases import Group, in_ranks, result, started, write_models
from result_cases import DELTA, MECHANISMS, numbers
from training_cases import status_of

from adapmixed.evaluation import evaluate_runs, read_result
from adapmixed.models import Ensemble
from adapmixed.privacy import FilterBudget, PerModelFilter
from adapmixed.ranks import ALONE, Ranks
from adapmixed.rng import SeededRandom

RUNS, QUERIES, BLOCK = 2, 30, 11  # three windows a run
TOKENS = torch.randint(3, 60, (80,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, members=3, zero=2)
    return folder


def answer(
    models: Path, path: Path, ranks: Ranks, progress: Callable[[int, int], None] | None = None
) -> list[Any]:
    ensemble = Ensemble.load(models / "base", models / "ensemble", ranks=ranks)
    budget = FilterBudget("renyi", 0.05, DELTA, 4.0)
    return numbers(
        evaluate_runs(
            ensemble, TOKENS, MECHANISMS, runs=RUNS, queries=QUERIES, delta=DELTA,
            rng=SeededRandom(3), block=BLOCK, rule={"noisy, the paper's rule": "paper"},
            model_filters={"filtered": PerModelFilter(3, budget)}, result=path, resume=True,
            save_seconds=0.0, progress=progress,
        )
    )  # fmt: skip


def killed(models: Path, path: Path, folder: Path, after: int) -> None:
    """Ends the leading rank after so many queries; the other one hears of it."""

    def end(done: int, total: int) -> None:
        if done > after:
            os.kill(os.getpid(), signal.SIGKILL)

    children = started(2, lambda ranks: answer(models, path, ranks, end), folder)
    assert [status_of(child) for child in children] == [-signal.SIGKILL, 0]
    assert "another rank has ended" in str(result(folder, 1))
    assert not read_result(path).complete


def test_killed_and_resumed(models: Path, tmp_path: Path) -> None:
    def whole(ranks: Group) -> list[Any]:
        return answer(models, tmp_path / "whole.json", ranks)

    reference, nothing = in_ranks(2, whole, tmp_path)
    assert len(reference) == RUNS * len(MECHANISMS) and nothing == []
    path = tmp_path / "killed.json"
    for after in (4, 16, 36, 45):  # in each run, in the first window and later
        killed(models, path, tmp_path, after)
    resumed, _ = in_ranks(2, lambda ranks: answer(models, path, ranks), tmp_path)
    assert resumed == reference
    assert in_ranks(2, lambda ranks: answer(models, path, ranks), tmp_path)[0] == reference


def test_resumed_over_another_number_of_ranks(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    killed(models, path, tmp_path, 36)
    found = answer(models, path, ALONE)
    reference, _ = in_ranks(2, lambda ranks: answer(models, tmp_path / "2.json", ranks), tmp_path)
    for mine, theirs in zip(found, reference, strict=True):
        assert mine[0] == theirs[0] and mine[2] == theirs[2] == QUERIES
        assert mine[1] == pytest.approx(theirs[1], rel=1e-6)
