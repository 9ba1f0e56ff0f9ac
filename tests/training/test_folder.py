"""A trainer killed at any moment leaves complete files, and the next run ends with the same."""

from __future__ import annotations

import itertools
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from processes import forked, killed_before, status_of, until
from training_cases import CONFIG, a_run, contents, trained

from adapmixed.training import FinetuneConfig, blocks, train_ensemble

HEAD = replace(CONFIG, target_modules=("lm_head",))


def assert_whole(folder: Path, reference: dict[str, bytes]) -> None:
    """Assert that every file but temporary ones equals the file of the finished run."""
    for path, content in contents(folder).items() if folder.exists() else ():
        if not path.startswith(".tmp-"):
            assert content == reference[path], path


@pytest.mark.parametrize("config", [CONFIG, HEAD], ids=["deep", "head"])
@pytest.mark.slow
def test_killed_before_every_change_of_the_disk(
    tiny: Path, tmp_path: Path, config: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the hidden states of output-layer members, which are in a file here."""
    monkeypatch.setattr(blocks, "IN_MEMORY", 0)
    small = {"num_models": 1, "config": replace(config, epochs=1), "validation_fraction": 0.0}
    run = a_run(tmp_path, tiny, "undisturbed", **small)
    reference = trained(run)
    for number in itertools.count(1):
        run = a_run(tmp_path, tiny, str(number), **small)
        status = killed_before(lambda: trained(run), number)  # noqa: B023
        assert_whole(run.output, reference)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        assert trained(run) == reference, number
        left = {path.name for path in (tmp_path / f"{number}.private").iterdir()}
        assert left == {"run.json", "shard.key"}
    assert number > 20


@pytest.mark.slow
def test_worker_processes_give_the_same_and_end_with_their_parent(
    tiny: Path, tmp_path: Path, reference: dict[str, bytes]
) -> None:
    whole, killed = a_run(tmp_path, tiny, "whole"), a_run(tmp_path, tiny, "killed")

    def work() -> None:
        for run in (whole, killed):
            train_ensemble(run, workers=2, say=lambda line: None)

    child = forked(work)
    until(lambda: list(killed.output.glob("member-*")), seconds=120)
    workers = psutil.Process(child).children(recursive=True)
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL
    assert contents(whole.output) == reference
    assert_whole(killed.output, reference)
    assert len(workers) >= 3  # the workers of the second run, and the server that forks them
    until(lambda: not any(worker.is_running() for worker in workers), seconds=30)
    assert trained(killed) == reference
