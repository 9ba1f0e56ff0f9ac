"""An evaluation over ranks that is killed continues from its result file, on any number of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from processes import status_of, until
from rank_cases import in_ranks, result, started, write_models
from result_cases import DELTA, EPSILONS, MECHANISMS, numbers

from adapmixed.ensemble import Ensemble
from adapmixed.evaluation import evaluate, loop
from adapmixed.ranks import ALONE, Ranks
from adapmixed.rng import SeededRandom

RUNS, QUERIES, BLOCK = 2, 30, 11  # three windows a run
TOKENS = torch.randint(3, 60, (80,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    return folder


def answer(
    models: Path,
    path: Path | None,
    ranks: Ranks,
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    ensemble = Ensemble.from_pretrained(models / "base", models / "ensemble", ranks=ranks)
    with patch.object(loop, "SAVE_SECONDS", 0.0):
        found = evaluate(
            ensemble, TOKENS, MECHANISMS, runs=RUNS, queries=QUERIES, delta=DELTA,
            rng=SeededRandom(3), block=BLOCK, epsilon=EPSILONS, result=path, progress=progress,
        )  # fmt: skip
    return numbers(found)


def killed(models: Path, path: Path, folder: Path, after: int, victims: tuple[int, ...]) -> None:
    """Kill ranks after some queries; a remaining rank raises."""
    reached, go = folder / "reached", folder / "go"

    def wait(done: int, total: int) -> None:
        if done > after:
            reached.touch()
            while not go.exists():
                time.sleep(0.01)

    children = started(2, lambda ranks: answer(models, path, ranks, wait), folder)
    until(reached.exists, seconds=45)
    for rank in victims:
        os.kill(children[rank], signal.SIGKILL)
    go.touch()
    expected = [-signal.SIGKILL if rank in victims else 0 for rank in range(2)]
    assert [status_of(child) for child in children] == expected
    for rank in {0, 1} - set(victims):
        assert "another rank has ended" in str(result(folder, rank))
    assert json.loads(path.read_bytes())["state"]["place"] < 3 * RUNS
    reached.unlink()
    go.unlink()


@pytest.mark.slow
def test_killed_and_resumed(models: Path, tmp_path: Path) -> None:
    def whole(ranks: Ranks) -> list[Any]:
        return answer(models, tmp_path / "whole.json", ranks)

    reference, nothing = in_ranks(2, whole, tmp_path)
    assert len(reference) == RUNS * len(MECHANISMS) and nothing == []
    path = tmp_path / "killed.json"
    # In each run, in the first window and later.
    for after, victims in ((4, (0, 1)), (16, (0,)), (36, (1,)), (45, (0, 1))):
        killed(models, path, tmp_path, after, victims)
    copy = shutil.copy(path, tmp_path / "copy.json")
    for _ in range(2):
        resumed, _ = in_ranks(2, lambda ranks: answer(models, path, ranks), tmp_path)
        assert resumed == reference
    # Another number of processes goes on, too; its batches are others, which round differently.
    for mine, theirs in zip(answer(models, copy, ALONE), reference, strict=True):
        assert mine[0] == theirs[0] and mine[2] == theirs[2] == QUERIES
        assert mine[1] == pytest.approx(theirs[1], rel=1e-6)
