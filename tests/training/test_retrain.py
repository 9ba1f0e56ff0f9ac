"""Training one shard again: its changes, its errors, and kills at every moment."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import (
    CONFIG,
    KEY,
    NUM_MODELS,
    USERS,
    a_run,
    contents,
    killed_before,
    rows,
    write_base,
    write_corpus,
)

from adapmixed.ensemble import Ensemble, read_manifest
from adapmixed.training import TrainingRun, assign_shards, train_ensemble
from adapmixed.training.ranks import Place

VICTIM = USERS[3]
HOMES = assign_shards(USERS, NUM_MODELS, key=bytes.fromhex(KEY))
HOME = HOMES[USERS.index(VICTIM)]
LESS = [row for row in rows() if row["user"] != VICTIM] + [{"user": VICTIM, "text": "the rest"}]
HEAD = replace(CONFIG, target_modules=("lm_head",), epochs=1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the old ensemble, and a new one on the corpus without some of a user's documents."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("ensembles")
    train(a_run(folder, base, "old", config=HEAD))
    train(less(folder, a_run(folder, base, "new", config=HEAD)))
    return folder


def train(run: TrainingRun, **settings: Any) -> list[str]:
    """Train, and return the lines about finished members."""
    lines: list[str] = []
    train_ensemble(run, say=lines.append, **settings)
    return [line for line in lines if "finished" in line]


def less(folder: Path, run: TrainingRun) -> TrainingRun:
    return replace(run, corpus=write_corpus(folder / "corpus.jsonl", LESS))


def old_copy(folders: Path, folder: Path, base: Path, name: str) -> TrainingRun:
    """Copy the old ensemble to `folder / name`; return a run over the current corpus."""
    shutil.copytree(folders / "old", folder / name)
    shutil.copytree(folders / "old.private", folder / f"{name}.private")
    return less(folder, a_run(folder, base, name, config=HEAD))


def run_file(folder: Path) -> bytes:
    return (folder.with_name(folder.name + ".private") / "run.json").read_bytes()


@pytest.mark.parametrize(
    ("member", "workers"), [(HOME, 2), (str(HOME), 1), (f"member-{HOME:03d}", 1)]
)
@pytest.mark.slow
def test_one_member_is_trained_again(
    base: Path, tmp_path: Path, folders: Path, member: int | str, workers: int
) -> None:
    """The result equals a fresh training on the current corpus in every bit."""
    run = old_copy(folders, tmp_path, base, "ensemble")
    before = {path: path.stat().st_mtime_ns for path in run.output.glob("member-*/*")}
    old, new = contents(folders / "old"), contents(folders / "new")
    name = f"member-{HOME:03d}"
    assert {path.split("/")[0] for path in old if old[path] != new[path]} == {name, "ensemble.json"}
    lines = train(run, retrain=member, workers=workers)
    assert [line.split(":")[0] for line in lines] == [name]
    assert contents(run.output) == new
    assert run_file(run.output) == run_file(folders / "new")
    after = {path: path.stat().st_mtime_ns for path in run.output.glob("member-*/*")}
    assert {path.parent.name for path in after if after[path] != before[path]} == {name}
    assert list(run.output.glob(".tmp-*")) == []
    # Repeated, or as the ordinary command, nothing is left to do.
    assert train(run, retrain=member) == train(run) == []
    assert contents(run.output) == new


def test_other_shards_must_be_as_they_were(base: Path, tmp_path: Path, folders: Path) -> None:
    run = old_copy(folders, tmp_path, base, "ensemble")
    other = next(user for user, home in zip(USERS, HOMES, strict=True) if home != HOME)
    changed = [row for row in LESS if row["user"] != other]
    run = replace(run, corpus=write_corpus(tmp_path / "corpus.jsonl", changed))
    second = f"member-{HOMES[USERS.index(other)]:03d}"
    with pytest.raises(ValueError, match=f"member-{HOME:03d}, but {second} would have to be"):
        train(run, retrain=HOME)
    with pytest.raises(ValueError, match="was begun with corpus_hmac"):
        train(run)
    assert contents(run.output) == contents(folders / "old")
    assert run_file(run.output) == run_file(folders / "old")


def test_a_withdrawn_member_stays_so(base: Path, tmp_path: Path, folders: Path) -> None:
    """A withdrawn member stays so, with or without its folder, after new text and after a kill."""
    other = next(home for home in HOMES if home != HOME)
    name = f"member-{other:03d}"
    for removed in (False, True):
        run = old_copy(folders, tmp_path, base, f"ensemble-{removed}")
        withdraw(run.output, other)
        if removed:
            shutil.rmtree(run.output / name)
        its_text = {user for user, home in zip(USERS, HOMES, strict=True) if home == other}
        left = [row for row in LESS if row["user"] not in its_text]
        run = replace(run, corpus=write_corpus(tmp_path / "corpus.jsonl", left))
        assert [line.split(":")[0] for line in train(run, retrain=HOME)] == [f"member-{HOME:03d}"]
        assert train(run) == train(run, retrain=HOME) == []
        (run.output / "ensemble.json").unlink()  # as after a kill during the exchange
        assert train(run) == []
        found = read_manifest(run.output)
        expected = read_manifest(folders / "new")
        assert found.members == tuple(
            None if index == other else one for index, one in enumerate(expected.members)
        )
        assert found.shards == expected.shards
        assert (run.output / name).exists() is not removed
        (run.output / "ensemble.json").rename(tmp_path / "kept")
        record = run.output.with_name(f"{run.output.name}.private") / "withdrawn.json"
        text = record.read_text()
        record.write_text("[1]")
        with pytest.raises(ValueError, match="withdrawn.json must map members to their records"):
            train(run)
        record.write_text(text)
        (tmp_path / "kept").rename(run.output / "ensemble.json")
        # Retraining it brings it back.
        run = less(tmp_path, run)
        train(run, retrain=other)
        assert contents(run.output) == contents(folders / "new")
        assert train(run) == []


def withdraw(folder: Path, member: int, name: str | None = None) -> None:
    path = folder / "ensemble.json"
    data = json.loads(path.read_text())
    data["members"][member] = name
    path.write_text(json.dumps(data))


def test_a_member_of_an_older_training_does_not_load(
    base: Path, tmp_path: Path, folders: Path
) -> None:
    """For instance one that a backup brings back after a user has withdrawn a document."""
    folder = Path(shutil.copytree(folders / "new", tmp_path / "ensemble"))
    place = folder / f"member-{HOME:03d}"
    shutil.rmtree(place)
    shutil.copytree(folders / "old" / place.name, place)
    with pytest.raises(ValueError, match="shard.json differs from ensemble.json"):
        Ensemble.from_pretrained(base, folder)
    # Records of one's own may have fewer entries, or digests under another key.
    path = folder / "ensemble.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        shard.update(identifier_key="0" * 32, sha256=shard["sha256"][::-1], identifiers=[])
        del shard["documents"]
    path.write_text(json.dumps(manifest))
    assert Ensemble.from_pretrained(base, folder).num_models == NUM_MODELS
    (place / "shard.json").write_text("{}")
    assert Ensemble.from_pretrained(base, folder).num_models == NUM_MODELS


def test_refusals(base: Path, tmp_path: Path, folders: Path) -> None:
    run = old_copy(folders, tmp_path, base, "ensemble")
    for member in (NUM_MODELS, -1, "member-3"):
        with pytest.raises(ValueError, match=f"a number below {NUM_MODELS}, got {member!r}"):
            train(run, retrain=member)
    with pytest.raises(ValueError, match="retrain must run in one process, got 2 ranks"):
        train(run, retrain=HOME, place=Place(0, 2))
    with pytest.raises(ValueError, match="was begun with seed = 0, got 1"):
        train(replace(run, seed=1), retrain=HOME)
    assert contents(run.output) == contents(folders / "old")
    with pytest.raises(ValueError, match="would have to be trained again too"):
        train(replace(run, output=tmp_path / "none"), retrain=HOME)


@pytest.mark.slow
def test_killed_before_every_change_of_the_disk(base: Path, tmp_path: Path, folders: Path) -> None:
    """A member in place is complete, old or new, and an ensemble that loads is consistent."""
    old, new = contents(folders / "old"), contents(folders / "new")
    corpora = {run_file(folders / name): files for name, files in (("old", old), ("new", new))}
    seen = set()
    for number in itertools.count(1):
        run = old_copy(folders, tmp_path, base, str(number))
        status = killed_before(lambda: train(run, retrain=HOME), number)  # noqa: B023
        left = {p: c for p, c in contents(run.output).items() if not p.startswith(".tmp-")}
        known = corpora[run_file(run.output)]
        assert all(content == known[path] for path, content in left.items()), number
        if "ensemble.json" in left:
            assert left == known
        whole = {path.split("/")[0] for path in left}
        assert all(path in left for path in known if path.split("/")[0] in whole), number
        seen.add((known is new, f"member-{HOME:03d}" in whole, "ensemble.json" in left))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        # Either command continues, the ordinary one with the recorded corpus.
        if known is new and number % 2 and "ensemble.json" not in left:
            train(run)
        else:
            train(run, retrain=HOME)
        assert contents(run.output) == new, number
        assert list(run.output.glob(".tmp-*")) == []
    assert left == new
    whole, bare, neither = (False, True, True), (False, True, False), (True, False, False)
    assert {whole, bare, neither, (True, True, False), (True, True, True)} <= seen
