"""File formats: a specimen of each kind is read, and another version of it raises."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from adapmixed.ensemble import manifest
from adapmixed.privacy import Accountant, PublicAnswer, read_ledger
from adapmixed.privacy.ledger import records
from adapmixed.training import folder as training
from adapmixed_lab.dp_sgd import training as dp_sgd
from adapmixed_lab.reproduce import dp_adapter
from adapmixed_lab.reproduce import result as reproduction
from adapmixed_lab.reproduce.outputs import write_outputs
from adapmixed_lab.reproduce.tables import text

FORMATS = Path(__file__).parent / "formats"


def test_ensembles(tmp_path: Path) -> None:
    """The ensemble has shards without identifiers and a missing member, so it is not verified."""
    shutil.copyfile(FORMATS / "ensemble-4.json", tmp_path / "ensemble.json")
    read = manifest.read_manifest(tmp_path)
    assert read.base_model == "adapmixed-demo-base"
    assert read.members == ("member-000", "member-001", None)
    assert read.adapted == {"lm_head": (4,), "transformer.h.3.attn.c_attn": (4, 8)}
    assert [shard.get("documents") for shard in read.shards] == [23, 1, None]
    assert not read.disjoint and read.revision is None
    assert read.base_files.keys() == {"config.json", "model.safetensors"}
    manifest.write_manifest(tmp_path, read)
    written = json.loads((tmp_path / "ensemble.json").read_text(encoding="utf-8"))
    assert written["format_version"] == manifest.FORMAT_VERSION
    assert manifest.read_manifest(tmp_path) == read


@pytest.mark.parametrize("path", sorted(FORMATS.glob("reproduction-*.json")), ids=lambda p: p.stem)
def test_reproductions(path: Path, tmp_path: Path) -> None:
    """The table is printed and the figures are drawn again."""
    result = reproduction.read_experiment(path)
    printed = text(result)
    assert "48.68" in printed and "0.924" in printed and "published, invalid" in printed
    assert len(write_outputs(result, tmp_path)) == 6


@pytest.mark.parametrize("path", sorted(FORMATS.glob("run-*.json")), ids=lambda p: p.stem)
def test_runs_of_training(path: Path, tmp_path: Path) -> None:
    """A run continues with the same settings only."""
    folder = training.TrainingFolder(tmp_path / "ensemble", 4)
    folder.prepare()
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    shutil.copyfile(path, folder.private / "run.json")
    folder.check_settings(settings)
    with pytest.raises(ValueError, match="was begun with epochs = 2, got 3"):
        folder.check_settings(settings | {"epochs": 3})
    refused(folder.private / "run.json", lambda: folder.check_settings(settings))


@pytest.mark.parametrize("path", sorted(FORMATS.glob("shard-*.json")), ids=lambda p: p.stem)
def test_records_of_members(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(path, tmp_path / "shard.json")
    record = training.read_member_record(tmp_path)
    assert (record["tokens"], record["shard"]["documents"]) == (74, 15)
    assert record["validation"]["loss"] == 7.896079627266766
    refused(tmp_path / "shard.json", lambda: training.read_member_record(tmp_path))
    for content, why in (
        ("{", "must be JSON"),
        ("[]", "a JSON object"),
        ('{"format_version": 1}', "must hold losses and shard"),
    ):
        (tmp_path / "shard.json").write_text(content)
        with pytest.raises(ValueError, match=why):
            training.read_member_record(tmp_path)


@pytest.mark.parametrize("path", sorted(FORMATS.glob("guarantee-*.json")), ids=lambda p: p.stem)
def test_guarantees_of_dp_sgd(path: Path, tmp_path: Path) -> None:
    shutil.copyfile(path, tmp_path / "guarantee.json")
    read = dp_adapter.read_dp_adapter(tmp_path)
    assert (read.epsilon, read.delta, read.unit) == (1.9992013231104389, 1e-4, "block of 16 tokens")
    assert "NOT for a whole user" in read.statement
    refused(tmp_path / "guarantee.json", lambda: dp_adapter.read_dp_adapter(tmp_path))


def test_a_ledger_of_another_version_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Accountant(1e-5, path=path) as accountant:
        accountant.add(PublicAnswer(1))
    assert read_ledger(path).charges == 1
    for version in (3, records.FORMAT_VERSION + 1):
        with closing(sqlite3.connect(path)) as database:
            database.execute(f"PRAGMA user_version = {version}")
            database.commit()
        wanted = f"must have format_version {records.FORMAT_VERSION}, got {version}"
        for read in (lambda: read_ledger(path), lambda: Accountant(1e-5, path=path)):
            with pytest.raises(ValueError, match=wanted):
                read()


def _run(path: Path) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    folder = training.TrainingFolder(path.parent / "ensemble", 4)
    folder.prepare()
    shutil.copyfile(path, folder.private / "run.json")
    folder.check_settings(settings)


# name of a specimen -> name under which it is read, its version, and its reader
READERS: dict[str, tuple[str, int, Callable[[Path], object]]] = {
    "ensemble": (
        "ensemble.json",
        manifest.FORMAT_VERSION,
        lambda path: manifest.read_manifest(path.parent),
    ),
    "reproduction": ("result.json", reproduction.FORMAT_VERSION, reproduction.read_experiment),
    "run": ("run.json", training.FORMAT_VERSION, _run),
    "shard": (
        "shard.json",
        training.FORMAT_VERSION,
        lambda path: training.read_member_record(path.parent),
    ),
    "guarantee": (
        "guarantee.json",
        dp_sgd.FORMAT_VERSION,
        lambda path: dp_adapter.read_dp_adapter(path.parent),
    ),
}


@pytest.mark.parametrize("kind", READERS)
def test_the_next_version_of_a_format_is_not_read(kind: str, tmp_path: Path) -> None:
    """The unchanged specimen is read, and with a greater version number it raises."""
    name, newest, read = READERS[kind]
    copy = tmp_path / name
    shutil.copyfile(FORMATS / f"{kind}-{newest}.json", copy)
    read(copy)
    written = copy.read_text(encoding="utf-8")
    later = re.sub(rf'("format_version": ?){newest}\b', rf"\g<1>{newest + 1}", written)
    assert later != written
    copy.write_text(later, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"format_version .*{newest + 1}"):
        read(copy)


def refused(path: Path, read: Callable[[], object]) -> None:
    """Check that another version of a file raises."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for version in (content["format_version"] + 1, None, "1"):
        path.write_text(json.dumps(content | {"format_version": version}), encoding="utf-8")
        with pytest.raises(ValueError, match="format_version must be"):
            read()
