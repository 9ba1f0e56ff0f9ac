"""Files of every released format are read: tests/formats/ holds one of each version of each kind.

A new version of a format needs its predecessor's specimen here, and code that reads it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from adapmixed.evaluation import read_result, result_file
from adapmixed.experiments import result as reproduction
from adapmixed.experiments.outputs import write_outputs
from adapmixed.experiments.tables import text
from adapmixed.models import manifest
from adapmixed.privacy import Ledger
from adapmixed.privacy.ledger import records
from adapmixed.report import table, view

FORMATS = Path(__file__).parent / "formats"
KINDS = {
    "ensemble": (manifest.FORMAT_VERSION, ".json"),
    "report": (view.FORMAT_VERSION, ".json"),
    "evaluation": (result_file.FORMAT_VERSION, ".json"),
    "reproduction": (reproduction.FORMAT_VERSION, ".json"),
    "ledger": (records.FORMAT_VERSION, ".sqlite"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_a_specimen_of_every_version(kind: str) -> None:
    newest, suffix = KINDS[kind]
    found = {path.name for path in FORMATS.glob(f"{kind}-*{suffix}")}
    assert found == {f"{kind}-{version}{suffix}" for version in range(1, newest + 1)}


@pytest.mark.parametrize("path", sorted(FORMATS.glob("ensemble-*.json")), ids=lambda p: p.stem)
def test_ensembles(path: Path, tmp_path: Path) -> None:
    """Before shards had identifiers: what cannot be checked is not verified."""
    shutil.copyfile(path, tmp_path / "ensemble.json")
    read = manifest.read_manifest(tmp_path)
    assert read.base_model == "adapmixed-demo-base"
    assert read.members == ("member-000", "member-001")
    assert [shard["documents"] for shard in read.shards] == [23, 1]
    assert not read.disjoint and read.revision is None
    manifest.write_manifest(tmp_path, read)
    written = json.loads((tmp_path / "ensemble.json").read_text(encoding="utf-8"))
    assert written["format_version"] == manifest.FORMAT_VERSION
    assert manifest.read_manifest(tmp_path) == read


@pytest.mark.parametrize("path", sorted(FORMATS.glob("ledger-*.sqlite")), ids=lambda p: p.stem)
def test_ledgers(path: Path, tmp_path: Path) -> None:
    """Its totals are those it was written with, and it goes on."""
    for file in FORMATS.glob(f"{path.name}*"):
        shutil.copyfile(file, tmp_path / file.name)
    with Ledger.open(tmp_path / path.name, delta=1e-5, configuration="specimen") as ledger:
        totals = ledger.totals
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
    """What it was written with; states of accountants and a filter are in it."""
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
        "filtered": (12.200155226065428, 3.1378630873338302),
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
