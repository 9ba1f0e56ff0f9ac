"""Training an ensemble on a corpus: its files, the dependencies of a member, and errors."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from families import tiny as model_of
from processes import forked, killed_before, status_of, until
from training_cases import (
    CONFIG,
    KEY,
    NUM_MODELS,
    USERS,
    a_run,
    contents,
    refuses,
    rows,
    trained,
    write_base,
    write_corpus,
    write_key,
)

from adapmixed.ensemble import Ensemble, read_manifest
from adapmixed.ensemble.members import read_member_record
from adapmixed.files import sole_writer
from adapmixed.training import assign_shards, train_ensemble
from adapmixed.training.shards import await_path


@pytest.fixture(scope="module")
def reference(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of an uninterrupted run."""
    torch.set_num_threads(1)
    return trained(a_run(tmp_path_factory.mktemp("reference"), tiny))


@pytest.mark.parametrize("target", ["lm_head", "c_attn"])
@pytest.mark.slow
def test_an_ensemble_is_whole_and_loads(
    tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    """Every shard holds out the end of its text; an empty one gives the public model."""
    caplog.set_level(logging.INFO, logger="adapmixed.training.run")
    config = replace(CONFIG, target_modules=(target,), early_stopping=True, validation_fraction=0.3)
    run = a_run(tmp_path, tiny, num_models=40, config=config)
    lines: list[str] = []
    train_ensemble(run, say=lines.append)
    manifest = read_manifest(run.output)
    shared, warning, *lines = lines
    assert shared.startswith("Shared shards: ")
    documents = [shard["documents"] for shard in manifest.shards]
    assert warning.startswith(f"warning: {documents.count(0)} of the 40 shards to train on are em")
    assert len(manifest.members) == len(manifest.shards) == len(lines) == 40
    assert manifest.base_model == "tiny-base"
    assert manifest.base_files.keys() == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    assert manifest.training["corpus"]["unit"] == "all documents of one 'user'"
    assert (manifest.training["epochs"], manifest.training["seed"]) == (2, 0)
    # No identifier, no text and no path of this machine.
    for name, content in contents(run.output).items():
        assert str(tmp_path).encode() not in content, name
        assert b"user-1" not in content and b"says that" not in content, name
    records = [read_member_record(run.output / f"member-{i:03d}") for i in range(40)]
    counts = [len(record["shard"]["identifiers"]) for record in records]
    assert sum(counts) == len(USERS) and counts.count(0) > 1 and counts.count(1) > 1
    private, public = Ensemble.from_pretrained(tiny, run.output).logits(torch.arange(6)[None])
    logs = [line for line in caplog.messages if line.startswith("member-")]
    for record, count, logits, logged in zip(records, counts, private, logs, strict=True):
        validation = record["validation"]
        assert record["shard"]["documents"] == 5 * count
        assert torch.equal(logits, public) == (record["epoch"] == 0)
        assert logged.endswith(": 0 documents, 0 tokens, validation None") == (count == 0)
        if count == 0:
            assert validation is None and record["epoch"] == 0 and record["losses"] == []
            continue
        assert record["tokens"] > 0 and len(validation["losses"]) == 2
        losses = [validation["public_loss"], *validation["losses"]]
        assert validation["loss"] == losses[record["epoch"]] == min(losses)
        assert validation["tokens"] == int(0.3 * (record["tokens"] + validation["tokens"]))
    # Each member has its own seed, so the initial A of empty shards (with B = 0) differs.
    empty = [f"member-{i:03d}" for i, count in enumerate(counts) if not count]
    weights = {(run.output / name / "adapter_model.safetensors").read_bytes() for name in empty}
    assert len(weights) == len(empty)


def test_the_operators_files_are_private(tiny: Path, tmp_path: Path) -> None:
    run, other = (
        replace(a_run(tmp_path, tiny), output=tmp_path / name / "ensemble")
        for name in ("one", "other")
    )
    trained(run)
    assert Ensemble.from_pretrained(tiny, run.output).num_models == NUM_MODELS
    assert read_manifest(run.output).document_names == "stable"
    private = tmp_path / "one" / "ensemble.private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "shard.key").stat().st_mode) == 0o600
    member = [*(run.output / "member-000").iterdir()]
    assert {path.name for path in member} == {
        "adapter_config.json", "adapter_model.safetensors", "shard.json",
    }  # fmt: skip
    for file in (run.output / "ensemble.json", *member):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert len(bytes.fromhex((private / "shard.key").read_text())) == 32
    # The shards' text was removed.
    assert {path.name for path in private.iterdir()} == {"run.json", "shard.key"}
    trained(other)
    drawn = other.output.with_name("ensemble.private") / "shard.key"
    assert (private / "shard.key").read_text() != drawn.read_text()


def test_a_base_in_another_dtype(tiny: Path, tmp_path: Path, reference: dict[str, bytes]) -> None:
    run = a_run(tmp_path, tiny, dtype="bfloat16")
    files = trained(run)
    assert Ensemble.from_pretrained(tiny, run.output).num_models == NUM_MODELS
    members = [path for path in files if path.endswith("safetensors")]
    assert members and not any(files[path] == reference[path] for path in members)


def test_a_member_depends_on_its_shard_alone(tiny: Path, tmp_path: Path) -> None:
    """Other members of shared shards keep every bit, and identifiers may come in any order.

    Places of their own are in test_shards.py.
    """
    head = replace(CONFIG, target_modules=("lm_head",), steps=40, shared_a=True)
    settings = {"config": replace(head, early_stopping=True)}
    reference = trained(a_run(tmp_path, tiny, "reference", **settings))
    victim = USERS[3]
    (home,) = assign_shards([victim], NUM_MODELS, key=bytes.fromhex(KEY))
    records = iter([row for row in rows() if row["user"] == victim][::-1])
    for name, changed in {
        "edited": [row | {"text": "x"} if row["user"] == victim else row for row in rows()],
        "removed": [row for row in rows() if row["user"] != victim],
        "reversed": [next(records) if row["user"] == victim else row for row in rows()],
        "sorted": sorted(rows(), key=lambda row: row["user"]),
    }.items():
        run = a_run(tmp_path, tiny, name, **settings)
        files = trained(replace(run, corpus=write_corpus(tmp_path / "corpus.jsonl", changed)))
        other = {path.split("/")[0] for path in reference if files[path] != reference[path]}
        expected = {"ensemble.json", f"member-{home:03d}"}
        assert other == (expected if name != "sorted" else {"ensemble.json"}), name


def test_one_run_at_a_time(tiny: Path, tmp_path: Path) -> None:
    """What killed processes left is removed when a run begins."""
    run, private = a_run(tmp_path, tiny), tmp_path / "ensemble.private"
    with patch("fcntl.flock", side_effect=OSError("there are none")):
        refuses("ensemble.private must lie on a file system with locks", run)
    assert not run.output.exists()
    (private / "shards-of-a-killed-rank").mkdir(mode=0o700)
    (run.output / ".next" / ".tmp-member-000-0").mkdir(parents=True)
    with sole_writer(private / "run.json"):
        refuses("another process trains into .*ensemble", run)
    assert (private / "shards-of-a-killed-rank").exists()
    trained(run)
    assert {path.name for path in private.iterdir()} == {"run.json", "shard.key"}
    assert not any(path.startswith(".") for path in contents(run.output))


def test_what_another_machine_made_is_awaited(tmp_path: Path) -> None:
    with patch("time.sleep", lambda _: (tmp_path / "late").touch()):
        await_path(tmp_path / "late")
    assert (tmp_path / "late").exists()


def test_a_run_goes_on_with_the_same_only(tiny: Path, tmp_path: Path) -> None:
    """A finished one is left alone."""
    run = a_run(tmp_path, tiny)
    trained(run)
    before = {path: path.stat().st_mtime_ns for path in run.output.rglob("*")}
    trained(run)
    assert {path: path.stat().st_mtime_ns for path in run.output.rglob("*")} == before

    for reason, change in (
        ("seed = 0, got 1", {"seed": 1}),
        ("num_models = 4, got 5", {"num_models": 5}),
        ("epochs = 2, got 3", {"config": replace(CONFIG, epochs=3)}),
        ("threads = 1, got 2", {"threads": 2}),
    ):
        refuses(f"was begun with {reason}", replace(run, **change))
    write_key(run.output).write_text(KEY[::-1])
    refuses("was begun with key_check", run)
    write_key(run.output)
    write_corpus(tmp_path / "corpus.jsonl", rows()[:-1])
    refuses("was begun with another corpus, or its text has changed: give the same corpus, ", run)
    write_corpus(tmp_path / "corpus.jsonl")
    (tmp_path / "ensemble" / "ensemble.json").unlink()
    trained(run)


def test_refusals_before_any_work(tiny: Path, tmp_path: Path) -> None:
    for name, value in (("num_models", 0), ("seed", 0.5), ("device", "tpu"), ("dtype", "float64")):
        with pytest.raises(ValueError, match=f"{name} must .*, got "):
            a_run(tmp_path, tiny, **{name: value})
    run = a_run(tmp_path, tiny)
    long = replace(CONFIG, block_size=64)
    refuses("block_size must be <= the base's 32", replace(run, config=long))
    unknown = replace(CONFIG, target_modules=("lm_head", "nosuch"))
    refuses("target_modules must name linear layers of .*'nosuch'", replace(run, config=unknown))
    refuses("workers must be an integer >= 1, got 0", run, workers=0)
    refuses("revision applies to hub names", replace(run, revision="main"))
    key = write_key(run.output)
    key.write_text("x" * 64)
    refuses("64 hexadecimal digits", run)
    write_key(run.output).chmod(0o644)
    refuses("readable by its owner alone", run)
    key.unlink()
    (tmp_path / "empty.jsonl").write_text("")
    empty = replace(run.corpus, source=str(tmp_path / "empty.jsonl"))
    refuses("corpus must hold text", replace(run, corpus=empty))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked.private").mkdir(mode=0o700)
    (tmp_path / "linked.private" / "run.json").write_text('{"format_version": 2, "settings": {}}')
    (tmp_path / "linked" / "member-001").symlink_to(tmp_path)
    refuses("members must be folders in the output", replace(run, output=tmp_path / "linked"))
    foreign = tmp_path / "foreign"
    (foreign / "member-000").mkdir(parents=True)
    refuses("has no record of its training", replace(run, output=foreign))
    (tmp_path / "open.private").mkdir()
    (tmp_path / "open.private").chmod(0o755)
    refuses("open to its owner alone", replace(run, output=tmp_path / "open"))


def test_a_base_that_could_not_be_loaded_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    tiny = write_base(tmp_path / "base")
    run = replace(a_run(tmp_path, tiny), output=tmp_path / "new")
    model_of("bert", vocab_size=2048).save_pretrained(tiny)  # of an untested type: it is tried
    query = replace(run, config=replace(CONFIG, target_modules=("query",)))
    refuses("bert does not: a later token changes earlier logits", query)
    model_of("mamba", vocab_size=2048).save_pretrained(tiny)
    refuses("key/value cache|attention layers only", run)

    def needs_timm(config: Any) -> None:
        raise ImportError("this model needs timm")

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", needs_timm)
    refuses("base must be a readable model, .* needs timm", run)
    assert not run.output.exists() and not run.output.with_name("new.private").exists()


def test_divergence_is_refused(tiny: Path, tmp_path: Path) -> None:
    run = a_run(tmp_path, tiny, config=replace(CONFIG, learning_rate=1e30, epochs=8))
    refuses("member-00.: training diverged", run)


def test_nobody_else_reads_a_member_before_it_is_published(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed at any moment leaves nothing that other users can read."""
    run = a_run(tmp_path, tiny, num_models=1, config=replace(CONFIG, epochs=1))
    modes: dict[str, int] = {}

    def interrupted(*_: object) -> None:
        (folder,) = run.output.glob(".next/.tmp-*")
        modes.update((path.name, path.stat().st_mode & 0o777) for path in folder.iterdir())
        modes["folder"] = folder.stat().st_mode & 0o777
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "chmod", interrupted)
    before = os.umask(0o022)
    try:
        with pytest.raises(KeyboardInterrupt):
            trained(run)
    finally:
        os.umask(before)
    assert (modes["folder"], modes["shard.json"]) == (0o700, 0o600)


def test_conversations_are_trained_on_as_the_base_renders_them(tmp_path: Path) -> None:
    tiny = write_base(tmp_path / "base")
    run = a_run(tmp_path, tiny, config=replace(CONFIG, epochs=1))
    talks: Any = [
        {"user": row["user"], "messages": [{"role": "user", "content": row["text"]}]}
        for row in rows()
    ]
    corpus = replace(write_corpus(tmp_path / "talks.jsonl", talks), chat_column="messages")
    before = set(tmp_path.iterdir())
    refuses("chat_column must be unset for a base without chat te", replace(run, corpus=corpus))
    assert set(tmp_path.iterdir()) == before
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }} {{ date_string }}"
    template += " {{ strftime_now('%d %B') }}{% endfor %}"
    (tiny / "chat_template.jinja").write_text(template)
    trained(replace(run, corpus=corpus))
    rendered = [row | {"text": f"<user>{row['text']} 26 Jul 2024 26 Jul 2024"} for row in rows()]
    texts = write_corpus(tmp_path / "texts.jsonl", rendered)
    trained(a_run(tmp_path, tiny, "same", config=run.config, corpus=texts))
    manifest, other = (read_manifest(tmp_path / name) for name in ("ensemble", "same"))
    assert manifest.training["corpus_hmac"] == other.training["corpus_hmac"]
    assert manifest.training["corpus"]["chat_column"] == "messages"


# A trainer killed at any moment leaves complete files, and the next run ends with the same.


def assert_whole(folder: Path, reference: dict[str, bytes]) -> None:
    """Assert that every file but temporary ones equals the file of the finished run."""
    for path, content in contents(folder).items() if folder.exists() else ():
        path = path.removeprefix(".next/")
        if not path.startswith(".tmp-"):
            assert content == reference[path], path


@pytest.mark.parametrize("target", ["c_attn", "lm_head"])
@pytest.mark.slow
def test_killed_before_every_change_of_the_disk(tiny: Path, tmp_path: Path, target: str) -> None:
    config = replace(CONFIG, epochs=1, target_modules=(target,), validation_fraction=0.0)
    small: dict[str, Any] = {"num_models": 1, "config": config}
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
    until(lambda: list(killed.output.glob(".next/member-*")), seconds=120)
    workers = psutil.Process(child).children(recursive=True)
    os.kill(child, signal.SIGKILL)
    assert status_of(child) == -signal.SIGKILL
    assert contents(whole.output) == reference
    assert_whole(killed.output, reference)
    assert len(workers) >= 3  # the workers of the second run, and the server that forks them
    until(lambda: not any(worker.is_running() for worker in workers), seconds=30)
    assert trained(killed) == reference
