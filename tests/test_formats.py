"""Files of every released format are read: tests/formats/ holds one of each version of each kind.

A new version of a format needs its predecessor's specimen here, and code that reads it.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapmixed.evaluation import read_result, result_file
from adapmixed.experiments import dp_adapter
from adapmixed.experiments import result as reproduction
from adapmixed.experiments.outputs import write_outputs
from adapmixed.experiments.tables import text
from adapmixed.models import manifest
from adapmixed.privacy import Accountant, BoundedRangeAnswer, Ledger, PerModelFilter
from adapmixed.privacy import filter as filters
from adapmixed.privacy import state as states
from adapmixed.privacy.ledger import records
from adapmixed.report import table, view
from adapmixed.training import dpsgd
from adapmixed.training import folder as training

FORMATS = Path(__file__).parent / "formats"
KINDS = {
    "ensemble": (manifest.FORMAT_VERSION, ".json"),
    "report": (view.FORMAT_VERSION, ".json"),
    "evaluation": (result_file.FORMAT_VERSION, ".json"),
    "reproduction": (reproduction.FORMAT_VERSION, ".json"),
    "ledger": (records.FORMAT_VERSION, ".sqlite"),
    "run": (training.FORMAT_VERSION, ".json"),
    "shard": (training.FORMAT_VERSION, ".json"),
    "guarantee": (dpsgd.FORMAT_VERSION, ".json"),
    "accountant": (states.FORMAT_VERSION, ".json"),
    "filter": (filters.FORMAT_VERSION, ".json"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_specimen_of_every_version(kind: str) -> None:
    newest, suffix = KINDS[kind]
    found = {path.name for path in FORMATS.glob(f"{kind}-*{suffix}")}
    assert found == {f"{kind}-{version}{suffix}" for version in range(1, newest + 1)}


def test_ensembles(tmp_path: Path) -> None:
    """Shards without identifiers, and a missing member: what cannot be checked is not verified."""
    shutil.copyfile(FORMATS / "ensemble-2.json", tmp_path / "ensemble.json")
    read = manifest.read_manifest(tmp_path)
    assert read.base_model == "adapmixed-demo-base"
    assert read.members == ("member-000", "member-001", None)
    assert read.adapted == {"lm_head": (4,), "transformer.h.3.attn.c_attn": (4, 8)}
    assert [shard.get("documents") for shard in read.shards] == [23, 1, None]
    assert not read.disjoint and read.revision is None
    manifest.write_manifest(tmp_path, read)
    written = json.loads((tmp_path / "ensemble.json").read_text(encoding="utf-8"))
    assert written["format_version"] == manifest.FORMAT_VERSION
    assert manifest.read_manifest(tmp_path) == read


def test_ensembles_that_do_not_say_what_members_adapt_are_refused(tmp_path: Path) -> None:
    shutil.copyfile(FORMATS / "ensemble-1.json", tmp_path / "ensemble.json")
    with pytest.raises(ValueError, match="format_version must be 2, got 1, .* train the ensemble"):
        manifest.read_manifest(tmp_path)


@pytest.mark.parametrize("path", sorted(FORMATS.glob("ledger-*.sqlite")), ids=lambda p: p.stem)
def test_ledgers(path: Path, tmp_path: Path) -> None:
    """Its totals are those it was written with, and it goes on."""
    for file in FORMATS.glob(f"{path.name}*"):
        shutil.copyfile(file, tmp_path / file.name)
    budget = Ledger.verify(tmp_path / path.name).description.filter_budget
    settings: dict[str, Any] = dict(delta=1e-5, configuration="specimen", filter_budget=budget)
    with Ledger.open(tmp_path / path.name, **settings) as ledger:
        totals = ledger.totals
        counts = [one.noisy_count for one in ledger.accountant.released_counts]
        assert counts == ([6] if path.stem == "ledger-3" else [])
        assert (ledger.charges, totals.queries) == (3, 6)
        assert totals.epsilon == float.fromhex((FORMATS / f"{path.stem}.epsilon").read_text())


@pytest.mark.parametrize("path", sorted(FORMATS.glob("report-*.json")), ids=lambda p: p.stem)
def test_reports(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    (method,) = view.read_methods(report)
    assert (method.name, method.queries, method.kind) == ("pmixed", 8, "fixed")
    assert "pmixed" in table(report)


@pytest.mark.parametrize("path", sorted(FORMATS.glob("evaluation-*.json")), ids=lambda p: p.stem)
def test_evaluations(path: Path) -> None:
    """What it was written with, but that the filter's budget states its own ε now."""
    stored = read_result(path)
    assert stored.complete and stored.configuration["runs"] == 1
    found = {one.name: one.evaluations[0] for one in stored.runs}
    assert {one.queries for one in found.values()} == {38}
    numbers = {name: (one.perplexity, one.guarantee.epsilon) for name, one in found.items()}
    expected = {
        "public": (12.033035149448356, 0.0),
        "noisy": (12.145427912577906, 1272.562700344189),
        "pmixed": (12.0574543872816, 7.999999999999841),
        "pool": (12.214094289423619, 4.8776734338838015),
        "filtered": (12.200155226065428, 3.1378616288316707),
    }
    assert list(numbers) == list(expected)
    for name, pair in expected.items():
        assert numbers[name] == pytest.approx(pair, rel=1e-12)


@pytest.mark.parametrize("path", sorted(FORMATS.glob("reproduction-*.json")), ids=lambda p: p.stem)
def test_reproductions(path: Path, tmp_path: Path) -> None:
    """Its table is printed and its figures are drawn again."""
    result = reproduction.read_experiment(path)
    printed = text(result)
    assert "48.68" in printed and "0.924" in printed and "published, invalid" in printed
    assert len(write_outputs(result, tmp_path)) == 4


@pytest.mark.parametrize("path", sorted(FORMATS.glob("run-*.json")), ids=lambda p: p.stem)
def test_runs_of_training(path: Path, tmp_path: Path) -> None:
    """A run that was begun goes on with the same settings alone."""
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
        ('{"format_version": 1}', "say"),
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


@pytest.mark.parametrize("path", sorted(FORMATS.glob("accountant-*.json")), ids=lambda p: p.stem)
def test_states_of_accountants(path: Path) -> None:
    """Of every kind of total; as exact as the machine's logarithms."""
    cases = json.loads(path.read_text(encoding="utf-8"))
    assert len(cases) == {"accountant-1": 14, "accountant-2": 16, "accountant-3": 17}[path.stem]
    for case in cases.values():
        accountant = Accountant.from_state(case["state"])
        found = accountant.epsilon()
        expected = case["epsilon"]
        if expected is not None:
            expected = pytest.approx(float(expected), rel=1e-9)
        assert (found.epsilon, found.kind) == (expected, case["kind"])
        assert list(found.caveats) == case["caveats"]
        with pytest.raises(ValueError, match="format_version must be"):
            Accountant.from_state(case["state"] | {"format_version": states.FORMAT_VERSION + 1})


def test_an_older_pool_has_its_older_meaning() -> None:
    """Add/remove then cost what replace-one does, and is not made cheaper by reading it."""
    text = (FORMATS / "accountant-1.json").read_text(encoding="utf-8")
    states_of = {name: case["state"] for name, case in json.loads(text).items()}
    for name in ("pool", "a planned pool"):
        read = Accountant.from_state(states_of[name])
        for accountant in (read, Accountant.from_state(read.state())):
            costs = [accountant.epsilon(way) for way in ("add_remove", "replace_one", "zero_out")]
            assert costs[0].epsilon == costs[1].epsilon > (costs[2].epsilon or 0.0)
            assert "constant" not in str(costs[0])
    newer = json.loads((FORMATS / "accountant-2.json").read_text(encoding="utf-8"))
    state = newer["a planned pool of a constant N"]["state"]
    costs = [Accountant.from_state(state).epsilon(way) for way in (None, "replace_one")]
    assert (costs[0].epsilon or 0.0) < (costs[1].epsilon or 0.0)
    with pytest.raises(ValueError, match="must have the fields"):  # no older reader took the flag
        Accountant.from_state(state | {"format_version": 1})


def test_an_older_state_does_not_say_what_its_counts_were_paid_for() -> None:
    """A filter with releases was beside it, at a sigma that is not in it."""
    for version in (1, 2):
        text = (FORMATS / f"accountant-{version}.json").read_text(encoding="utf-8")
        state = json.loads(text)["filter"]["state"]
        assert Accountant.from_state(state).released_counts == ()
        state["running"]["releases"] = 1
        with pytest.raises(ValueError, match="releases must be 0 in a state of format 2 or 1"):
            Accountant.from_state(state)
    newest = json.loads((FORMATS / "accountant-3.json").read_text(encoding="utf-8"))
    read = Accountant.from_state(newest["a filter with counts"]["state"])
    assert [one.noisy_count for one in read.released_counts] == [-7, 24]


def test_an_older_ledger_goes_on_in_its_own_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, path = records.Description.fresh, tmp_path / "ledger.sqlite"

    def older(*arguments: Any) -> records.Description:
        return replace(fresh(*arguments), format_version=1)

    event = BoundedRangeAnswer(2.0, -0.25, 0.5, 5, 2)
    monkeypatch.setattr(records.Description, "fresh", staticmethod(older))
    with Ledger.open(path, delta=1e-5, configuration="x", adjacency="add_remove") as ledger:
        with pytest.raises(ValueError, match="constant_models must be False in a ledger of format"):
            ledger.charge(replace(event, constant_models=True))
        ledger.charge(event)
    monkeypatch.undo()
    with Ledger.open(path, delta=1e-5, configuration="x", adjacency="add_remove") as ledger:
        before = ledger.totals.epsilon
        ledger.charge(event)
    reading = Ledger.verify(path)
    assert (reading.charges, reading.description.format_version) == (2, 1)
    expected = Accountant(1e-5, adjacency="replace_one").add([event, event]).epsilon().epsilon
    assert reading.totals.epsilon == expected and (before or 0.0) < (expected or 0.0)
    with closing(sqlite3.connect(path)) as database:
        written = database.execute("SELECT format_version, events FROM record").fetchall()
        assert all(version == 1 and "constant" not in events for version, events in written)
        database.execute("PRAGMA user_version = 2")
        database.commit()
    with pytest.raises(ValueError, match="format_version must be that of its description, 1"):
        Ledger.verify(path)


@pytest.mark.parametrize("path", sorted(FORMATS.glob("filter-*.json")), ids=lambda p: p.stem)
def test_states_of_filters(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    read = PerModelFilter.from_state(case["state"])
    assert [spent.hex() for spent in read.spent.tolist()] == case["spent"]
    with pytest.raises(ValueError, match="format_version must be"):
        PerModelFilter.from_state(case["state"] | {"format_version": filters.FORMAT_VERSION + 1})


def _run(path: Path) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    folder = training.TrainingFolder(path.parent / "ensemble", 4)
    folder.prepare()
    shutil.copyfile(path, folder.private / "run.json")
    folder.check_settings(settings)


def _states(path: Path, read: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for case in [content] if "state" in content else content.values():
        read(case["state"])


# What a specimen is called where it is read, and its reader.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "ensemble": ("ensemble.json", lambda path: manifest.read_manifest(path.parent)),
    "report": ("report.json", lambda path: view.read_methods(json.loads(path.read_text()))),
    "evaluation": ("result.json", read_result),
    "reproduction": ("result.json", reproduction.read_experiment),
    "ledger": ("ledger.sqlite", Ledger.verify),
    "run": ("run.json", _run),
    "shard": ("shard.json", lambda path: training.read_member_record(path.parent)),
    "guarantee": ("guarantee.json", lambda path: dp_adapter.read_dp_adapter(path.parent)),
    "accountant": ("state.json", lambda path: _states(path, Accountant.from_state)),
    "filter": ("state.json", lambda path: _states(path, PerModelFilter.from_state)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_version_of_every_format_is_refused(kind: str, tmp_path: Path) -> None:
    """As it stands the specimen is read; with a greater number alone it is not."""
    newest, suffix = KINDS[kind]
    name, read = READERS[kind]
    specimen, copy = FORMATS / f"{kind}-{newest}{suffix}", tmp_path / name
    shutil.copyfile(specimen, copy)
    if kind == "ledger":
        shutil.copyfile(f"{specimen}-head", f"{copy}-head")
    read(copy)
    if kind == "ledger":
        with closing(sqlite3.connect(copy)) as database:
            database.execute(f"PRAGMA user_version = {newest + 1}")
            database.commit()
    else:
        written = copy.read_text(encoding="utf-8")
        later = re.sub(rf'("format_version": ?){newest}\b', rf"\g<1>{newest + 1}", written)
        assert later != written
        copy.write_text(later, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"format_version .*{newest + 1}"):
        read(copy)


def refused(path: Path, read: Callable[[], object]) -> None:
    """Another version of a file is not read."""
    content = json.loads(path.read_text(encoding="utf-8"))
    for version in (content["format_version"] + 1, None, "1"):
        path.write_text(json.dumps(content | {"format_version": version}), encoding="utf-8")
        with pytest.raises(ValueError, match="format_version must be"):
            read()
