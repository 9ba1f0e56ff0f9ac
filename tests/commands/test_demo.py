"""``adapmixed demo``: its report, and the checks before it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trained_demo import copy_trained

from adapmixed.cli import main

pytestmark = pytest.mark.usefixtures("demo_ensemble")


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
    assert all(entry["queries"] == 48 and entry["name"] in printed for entry in report["methods"])
    assert all(entry["epsilon"] is None for entry in report["methods"][1:4])
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
