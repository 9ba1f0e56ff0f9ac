"""``adapmixed evaluate`` and ``demo``: methods, files, reports, checks before they begin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trained_demo import MODELS, copy_trained

from adapmixed.cli import main
from adapmixed.data import held_out_text
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
    assert made == {name: repr(one) for name, one in (references | private).items()}
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


@pytest.mark.slow
def test_demo_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_trained(tmp_path / "report")
    assert main(["demo", "--out", str(tmp_path / "report"), "--queries", "48"]) == 0
    printed = capsys.readouterr().out
    steps = [line for line in printed.splitlines() if " of 5: " in line]
    assert [step.split(" s] ")[1][0] for step in steps] == ["1", "2", "3", "4", "5"]
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000
    report = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    names = [method["name"] for method in report["methods"]]
    assert names == [
        "public", "unprotected", names[2], "one adapter, all text", "pmixed", "adapmixed",
        "clipped-log-pool, ε ≤ 1", "clipped-log-pool, ε ≤ 3",
        "clipped-mixing, ε ≤ 1", "clipped-mixing, ε ≤ 3",
    ]  # fmt: skip
    assert names[2].startswith("unprotected pool, κ = ")
    assert all(one["queries"] == 48 and one["name"] in printed for one in report["methods"])
    assert all(one["epsilon"] is None for one in report["methods"][1:4])
    assert report["methods"][0]["epsilon"] == 0
    assert 0.45 < report["methods"][5]["epsilon"] < 2
    for method in report["methods"][6:]:
        budget = float(method["name"][-1])
        assert method["kind"] == "fixed" and 0.8 * budget < method["epsilon"] <= budget
    # The sample is drawn from the system's randomness, so it may end with its first token.
    assert isinstance(report["sample"]["text"], str)


def test_the_demo_checks_its_arguments_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for queries in ("0", "-5", "10000000"):
        assert main(["demo", "--out", str(tmp_path / "out"), "--queries", queries]) == 2
        printed = capsys.readouterr()
        assert "queries must be" in printed.err and "training" not in printed.out
    assert list((tmp_path / "out").iterdir()) == []
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err
