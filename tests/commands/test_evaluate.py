"""``adapmixed evaluate``: methods, files, and the page of ``--report``."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_cases import Page
from trained_demo import DEMO_ENSEMBLE, MODELS

from adapmixed.cli import main
from adapmixed.commands.evaluate import validation_losses
from adapmixed.data import demo_base, held_out_documents, held_out_text
from adapmixed.ensemble import read_manifest, write_manifest
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)

pytestmark = pytest.mark.usefixtures("demo_ensemble")
POOL = "clipped-log-pool lower=-0.25 upper=1 scale=2"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(held_out_text()[:6]), encoding="utf-8")
    return path


BUDGETED = ["--epsilon=2", f"--mechanism={POOL}", "--mechanism=clipped-mixing lower=0.5 upper=2"]
FIXED = ["--mechanism=adapmixed", "--mechanism=adapmixed  screen=public", f"--mechanism={POOL}"]
FIXED += ["--mechanism=pmixed epsilon=7", "--delta=1e-6"]
MADE: dict[bool, dict[str, Mechanism]] = {
    True: {"clipped-log-pool": ClippedLogPool(-0.25, 1.0, 2.0),
           "clipped-mixing": ClippedMixing(0.5, 2.0, order=8.0)},
    False: {"adapmixed": AdaPMixED(18.0, 0.2),
            "adapmixed screen=public": AdaPMixED(18.0, 0.2, screen="public"),
            "clipped-log-pool": ClippedLogPool(-0.25, 1.0, 2.0, 18),
            "pmixed": PMixED(7.0, 1e-6, 18, 3.0)},
}  # fmt: skip
"""Each with its name, or its text if several are of one kind."""


@pytest.mark.parametrize("budgeted", [True, False])
def test_methods_side_by_side_and_a_result_to_go_on_from(
    budgeted: bool, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "out.json", tmp_path / "result.json"
    command = ["evaluate", *MODELS, "--text", str(text), "--block=17", "--stride=5", "--seed=1"]
    command += ["--queries=18", "--mechanism=unprotected", *(BUDGETED if budgeted else FIXED)]
    command += ["--json", str(path), "--result", str(result)]
    assert main(command) == 0
    first, report = path.read_bytes(), json.loads(path.read_text(encoding="utf-8"))
    methods = {method["name"]: method for method in report["methods"]}
    private, made = MADE[budgeted], report["config"]["mechanisms"]
    references: dict[str, Mechanism] = {"public": PublicOnly(), "unprotected": Unprotected()}
    assert made == {name: repr(mechanism) for name, mechanism in (references | private).items()}
    if not budgeted:
        assert 6.999 < methods["pmixed"]["epsilon"] <= 7
        assert "Up to 18 answered queries" in methods["pmixed"]["guarantee"]
    assert list(methods) == ["public", "unprotected", *private]
    assert {method["queries"] for method in report["methods"]} == {18}
    assert methods["unprotected"]["epsilon"] is None and methods["public"]["epsilon"] == 0
    for name in private:
        fixed = "fixed in advance that may be published" in methods[name]["guarantee"]
        assert fixed == (not name.startswith("adapmixed"))
        assert (methods[name]["method"] == "per-shard budget") == budgeted
        assert not budgeted or 1.9 < methods[name]["epsilon"] <= 2
    assert report["config"]["stride"] == 5
    written = result.read_bytes()
    assert main(command) == 0
    assert path.read_bytes() == first and result.read_bytes() == written
    assert main([*command, "--seed=2"]) == 2
    assert "must be of the same evaluation to be resumed: randomness" in capsys.readouterr().err


def test_losses_come_from_the_members_folders(tmp_path: Path) -> None:
    manifest = Path(__file__).parents[1] / "formats/ensemble-5.json"
    shutil.copyfile(manifest, tmp_path / "ensemble.json")
    assert validation_losses(tmp_path) == []
    records = (
        ({"tokens": 3, "loss": 4.25, "public_loss": 4.5}, [5.0, 4.5]),
        (None, [4.75]),  # nothing was held out
        (None, []),  # an empty shard
    )
    for index, (validation, losses) in enumerate(records):
        folder = tmp_path / f"member-{index:03d}"
        folder.mkdir()
        record = {"format_version": 2, "shard": {}, "tokens": 700, "losses": losses}
        record["validation"] = validation
        (folder / "shard.json").write_text(json.dumps(record), encoding="utf-8")
    expected = {"member": "member-000", "loss": 4.25, "public_loss": 4.5}
    assert validation_losses(tmp_path) == [expected]


@pytest.mark.slow
def test_evaluate_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ensemble, text, folder = (tmp_path / name for name in ("ensemble", "text.txt", "page"))
    ensemble.mkdir()
    whole = read_manifest(DEMO_ENSEMBLE)
    write_manifest(ensemble, replace(whole, members=whole.members[:2], shards=whole.shards[:2]))
    for index, member in enumerate(whole.members[:2]):
        shutil.copytree(DEMO_ENSEMBLE / member, ensemble / member)
        record = {"format_version": 2, "shard": whole.shards[index], "tokens": 700}
        record["losses"] = [5.0, 4.5 - index]
        record["validation"] = {"tokens": 3, "loss": 4.25 + index, "public_loss": 4.5}
        (ensemble / member / "shard.json").write_text(json.dumps(record), encoding="utf-8")
    text.write_text("\n\n".join(doc.text for doc in held_out_documents()[:2]), encoding="utf-8")
    command = ["evaluate", "--base", str(demo_base()), "--ensemble", str(ensemble), "--text"]
    command += [str(text), "--queries", "20", "--block", "21", "--seed", "3", "--report"]
    run = tmp_path / "run.json"
    assert main([*command, str(folder), "--json", str(run), "--diagnostics"]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"wrote {folder / 'report.html'}\n"
    assert printed.out.splitlines()[-1].startswith("No share of the gain is stated")
    assert (folder / "report.json").read_bytes() == run.read_bytes()
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert {method["tokens_per_second"] for method in report["methods"]} == {None}
    assert "PRIVATE, for the operator: the utility" in printed.out
    assert [entry["loss"] for entry in report["validation"]] == [4.25, 5.25]
    assert {"validation.svg", "validation.pdf"} <= {path.name for path in folder.iterdir()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    assert report["environment"]["adapmixed"] and report["environment"]["processors"]
    html, drawn = (folder / "report.html").read_text("utf-8"), sorted(folder.glob("*.svg"))
    assert all(path.read_text(encoding="utf-8").strip() in html for path in drawn)
    assert [path.stem for path in sorted(folder.glob("*.pdf"))] == [path.stem for path in drawn]
    page = Page(html)
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids)) and "theorem’s bound" in page.text
    assert "No share of the gain is stated" in page.text and "text.txt: 2 models" in page.text


def test_a_page_that_cannot_be_written_is_no_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    command = ["evaluate", "--base", "none", "--ensemble", "none", "--text", "none", "--report"]
    assert main([*command, str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "adapmixed_lab.figures.html", None)
    monkeypatch.delattr("adapmixed_lab.figures.html", raising=False)
    assert main([*command, str(tmp_path / "page")]) == 2
    words = "the report's page needs matplotlib: pip install 'adapmixed[lab]'"
    assert words in capsys.readouterr().err
