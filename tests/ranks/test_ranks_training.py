"""Ranks that train an ensemble take members in turn, and write what one process writes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rank_cases import in_ranks, result, started, status_of
from training_cases import CONFIG, NUM_MODELS, a_run, contents, rows, write_base, write_corpus

from adapmixed.errors import ProcessError
from adapmixed.ranks import Ranks
from adapmixed.training import TrainingRun, train_ensemble
from adapmixed.training.pool import MemberTrainer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "tiny-base")


def train(run: TrainingRun, **ranks: Ranks) -> dict[str, bytes]:
    train_ensemble(run, say=lambda line: None, **ranks)
    return contents(run.output)


def test_ranks_give_the_same_even_if_one_is_killed(base: Path, tmp_path: Path) -> None:
    reference = train(a_run(tmp_path, base, "one"))
    run, killed = a_run(tmp_path, base, "three"), a_run(tmp_path, base, "killed")
    assert all(found is None for found in in_ranks(3, lambda ranks: work(run, ranks), tmp_path))
    assert contents(run.output) == reference
    assert {path.name for path in (tmp_path / "three.private").iterdir()} == {"run.json"}

    def dies(self: MemberTrainer, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work_or_die(ranks: Ranks) -> None:
        if not ranks.is_main:
            MemberTrainer.train = dies  # type: ignore[method-assign]  # in this child alone
        work(killed, ranks)

    children = started(2, work_or_die, tmp_path)
    assert [status_of(child) for child in children] == [0, -signal.SIGKILL]
    error = result(tmp_path, 0)
    assert isinstance(error, ProcessError) and "another rank has ended" in str(error)
    left = {path.split("/")[0] for path in contents(killed.output)}
    assert left == {f"member-{index:03d}" for index in range(0, NUM_MODELS, 2)}
    assert train(killed) == reference
    assert {path.name for path in (tmp_path / "killed.private").iterdir()} == {"run.json"}


def work(run: TrainingRun, ranks: Ranks) -> None:
    train(run, ranks=ranks)


def test_ranks_that_train_something_else(base: Path, tmp_path: Path) -> None:
    """Nothing is recorded, so that the right run can begin."""
    run = a_run(tmp_path, base)
    corpus = write_corpus(tmp_path / "other" / "corpus.jsonl", rows()[1:])
    changed = {
        "epochs": replace(run, config=replace(CONFIG, epochs=3)),
        "corpus_hmac": replace(run, corpus=corpus),
    }
    for name, other in changed.items():
        for error in in_ranks(
            2, lambda ranks, o=other: work((run, o)[ranks.rank], ranks), tmp_path
        ):  # type: ignore[misc]
            assert isinstance(error, ValueError)
            assert f"ranks must agree on {name}, but rank 1 differs" in str(error)
    assert contents(run.output) == {}
    five = in_ranks(NUM_MODELS + 1, lambda ranks: work(run, ranks), tmp_path)
    assert all("got 5 processes for 4 members" in str(error) for error in five)
    assert not (tmp_path / "ensemble.private" / "run.json").exists()
