"""``adapmixed-lab audit``: what it prints, its exit status, its JSON."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapmixed_lab.audit import Effort, Finding
from adapmixed_lab.cli import main


@pytest.mark.slow
def test_one_audit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    arguments = ["audit", "screening", "--seconds", "0.5", "--seed", "2", "--json", str(path)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "BROKEN" not in printed and "caught      control: " in printed
    report = json.loads(path.read_text(encoding="utf-8"))
    assert (report["format_version"], report["kind"]) == (2, "audit")
    claims = [f for f in report["findings"] if not f["control"]]
    controls = len(report["findings"]) - len(claims)
    assert f"{len(claims)} of {len(claims)} claims hold" in printed.splitlines()[-1]
    assert f"{controls} of {controls} controls are caught" in printed.splitlines()[-1]
    assert report["ok"] is True
    assert report["seed"] == 2 and report["seconds"] == 0.5
    assert {f["verdict"] for f in report["findings"]} == {"holds", "caught"}
    for one in claims:
        assert one["measured"] <= one["claimed"] and one["ok"] is True


@pytest.mark.parametrize(
    ("finding", "word"),
    [
        (Finding("tokens", "a leak", "ε", 1.0, 1.5, 0.999), "BROKEN"),
        (Finding("tokens", "a bug", "ε", 1.0, 0.5, 0.999, control=True), "NOT CAUGHT"),
    ],
)
def test_what_is_broken_is_reported_as_such(
    finding: Finding,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def audit(effort: Effort) -> Iterator[Finding]:
        yield Finding("tokens", "another", "ε", 1.0, 0.9, 0.999)
        yield finding

    monkeypatch.setattr("adapmixed_lab.audit.tokens.audit", audit)
    path = tmp_path / "audit.json"
    assert main(["audit", "tokens", "--json", str(path)]) == 1
    assert f"  {word}" in capsys.readouterr().out
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["ok"] is False
    assert [f["ok"] for f in report["findings"]] == [True, False]
    assert report["findings"][1]["verdict"] == word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "NAME must be one of tokens"),
        (["--seconds", "0"], "seconds must be > 0"),
        (["--seconds", "nan"], "seconds must be > 0"),
        (["--seed", "-1"], "--seed must be >= 0, got -1"),
        (["--json", "/nowhere/at/all.json"], "--json must name a file"),
    ],
)
def test_arguments_that_are_not_allowed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err
