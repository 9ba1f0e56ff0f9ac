"""Ranks that train an ensemble take members in turn, and write what one process writes."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from rank_cases import in_ranks, result, started, status_of
from training_cases import (
    CONFIG,
    NUM_MODELS,
    USERS,
    a_run,
    contents,
    rows,
    trained,
    write_base,
    write_corpus,
)

from adapmixed.ensemble import read_manifest
from adapmixed.errors import ProcessError
from adapmixed.ranks import Ranks
from adapmixed.training import TrainingRun
from adapmixed.training import run as training_run

PRIVATE = {"run.json", "shard.key"}


def test_ranks_give_the_same_even_if_one_is_killed(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    reference = trained(a_run(tmp_path, base, "one"))
    run = a_run(tmp_path, base, "three")
    in_ranks(3, lambda ranks: trained(run, ranks=ranks), tmp_path)
    assert contents(run.output) == reference
    assert {path.name for path in (tmp_path / "three.private").iterdir()} == PRIVATE

    def dies(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for victim in range(2):
        run = a_run(tmp_path, base, f"killed-{victim}")

        def work(ranks: Ranks, run: TrainingRun = run, victim: int = victim) -> None:
            if ranks.rank == victim:
                training_run.member_trainer = lambda *_: dies  # in this child alone
            trained(run, ranks=ranks)

        ended = [status_of(child) for child in started(2, work, tmp_path)]
        assert ended[victim] == -signal.SIGKILL and ended[1 - victim] == 0
        error = result(tmp_path, 1 - victim)
        assert isinstance(error, ProcessError) and "another rank has ended" in str(error)
        left = {path.rpartition("/")[0] for path in contents(run.output)}
        assert left == {f".next/member-{index:03d}" for index in range(1 - victim, NUM_MODELS, 2)}
        assert trained(run) == reference
        assert {path.name for path in tmp_path.glob(f"killed-{victim}.private/*")} == PRIVATE


def test_ranks_update(tmp_path: Path) -> None:
    """Both of them have members whose text has changed."""
    base, newer = write_base(tmp_path / "base"), [row for row in rows() if row["user"] > USERS[1]]
    single, spread = (
        a_run(tmp_path, base, name, num_models=16, share_shards=False) for name in ("one", "two")
    )
    assert trained(single) == trained(spread)
    write_corpus(tmp_path / "corpus.jsonl", newer)
    in_ranks(2, lambda ranks: trained(spread, ranks=ranks, update=True), tmp_path)
    assert trained(single, update=True) == contents(spread.output)
    assert sum(shard["documents"] > 0 for shard in read_manifest(spread.output).shards) == 10


def test_ranks_wait_longer_than_their_timeout(tmp_path: Path) -> None:
    """One has more members to train than the others have."""

    children = []
    for slow in range(2):  # both at the same time
        (tmp_path / f"{slow}").mkdir()

        def work(ranks: Ranks, slow: int = slow) -> None:
            time.sleep(4.0 * (ranks.rank == slow))
            ranks.wait()

        children += started(2, work, tmp_path / f"{slow}", timeout=3.0)
    assert [status_of(child) for child in children] == [0] * 4
    results = [result(tmp_path / f"{slow}", rank) for slow in range(2) for rank in range(2)]
    assert results == [None] * 4


def test_ranks_that_train_something_else(tmp_path: Path) -> None:
    """Nothing is recorded, so that the right run can begin."""
    run = a_run(tmp_path, write_base(tmp_path / "base"))
    corpus = write_corpus(tmp_path / "other" / "corpus.jsonl", rows()[1:])
    changed = {
        "epochs": replace(run, config=replace(CONFIG, epochs=3)),
        "corpus_hmac": replace(run, corpus=corpus),
    }
    for name, other in changed.items():
        work = lambda ranks, other=other: trained((run, other)[ranks.rank], ranks=ranks)  # noqa: E731
        for error in in_ranks(2, work, tmp_path):
            assert isinstance(error, ValueError)
            assert f"ranks must agree on {name}, but rank 1 differs" in str(error)
    assert contents(run.output) == {}
    five = in_ranks(NUM_MODELS + 1, lambda ranks: trained(run, ranks=ranks), tmp_path)
    assert all("got 5 processes for 4 members" in str(error) for error in five)
    assert not (tmp_path / "ensemble.private" / "run.json").exists()
