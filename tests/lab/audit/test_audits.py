"""Each audit, small, and ``adapmixed-lab audit``: what is broken is called so and ends with 1."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy.costs import screening_rho
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import (
    AUDITS,
    Effort,
    Finding,
    bounds,
    run,
    sampler,
    screening,
    search,
    tokens,
)
from adapmixed_lab.audit.finding import as_json
from adapmixed_lab.cli import main

ELSEWHERE = ("screening", "synthesis")  # test_one_audit, test_synthesis.py


@pytest.mark.parametrize("name", [one for one in AUDITS if one not in ELSEWHERE])
@pytest.mark.slow
def test_an_audit_passes(name: str) -> None:
    findings = list(run([name], Effort(1.0, 1)))
    assert [f for f in findings if f.verdict not in ("holds", "caught")] == []
    assert {f.audit for f in findings} == {name}
    assert any(f.control for f in findings) and not all(f.control for f in findings)


@pytest.mark.parametrize(
    ("measured", "control", "verdict"),
    [
        (1.0, False, "holds"),
        (math.nextafter(1.0, 2.0), False, "BROKEN"),
        (math.nan, False, "BROKEN"),
        (math.inf, False, "BROKEN"),
        (1.5, True, "caught"),
        (1.0, True, "NOT CAUGHT"),
        (math.nan, True, "NOT CAUGHT"),
    ],
)
def test_verdicts(measured: float, control: bool, verdict: str) -> None:
    finding = Finding("a", "b", "c", 1.0, measured, 0.999, control)
    assert finding.verdict == verdict and finding.ok == (verdict in ("holds", "caught"))
    (entry,) = as_json([finding], Effort())["findings"]  # type: ignore[misc]
    assert entry["verdict"] == verdict and float(entry["measured"]) == pytest.approx(
        measured, nan_ok=True
    )


@pytest.mark.parametrize(
    ("stated", "running"),
    [
        (ClippedMixing(0.3, 3.0, queries=1), ClippedMixing(0.2, 3.0, queries=1)),
        (ClippedMixing(0.3, 3.0, queries=1), ClippedMixing(0.3, 3.6, queries=1)),
        (ClippedLogPool(-1.0, 1.0, 2.0, queries=1), ClippedLogPool(-1.0, 1.0, 3.0, queries=1)),
    ],
)
def test_tokens_of_another_mechanism_than_the_stated_break_it(
    stated: Mechanism, running: Mechanism
) -> None:
    game = tokens.Game("game", stated, 2, "replace_one", tokens.TINY, running)
    found = tokens.play(game, 60_000, SeededRandom(2))
    assert found > game.claimed()
    honest = tokens.Game("game", stated, 2, "replace_one", tokens.TINY)
    assert 0.6 * game.claimed() < tokens.play(honest, 60_000, SeededRandom(2)) <= game.claimed()


@pytest.mark.parametrize("number", [0, 4])
def test_a_probability_that_is_no_number_breaks_a_claim(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = search.distribution

    def answers(*given: Any) -> search.Array:
        found = distribution(*given)
        found[0, 0] = math.nan
        return found

    monkeypatch.setattr(search, "distribution", answers)
    assert bounds.attack(bounds.targets()[number], 2, np.random.default_rng(0)) == math.inf


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("clipped-mixing [0.607, 1.65], N = 3, zero_out", 0.99),
        ("clipped-log-pool, member 0 of 3, zero_out", 0.99),
        ("adapmixed α = 18, member 0 of 3, add_remove", 0.9999),
        ("adapmixed α = 18, member 0 of 3, zero_out", 0.9999),
        ("adapmixed α = 3, member 0 of 3, add_remove, loss at order 8", 0.9999),
        ("adapmixed, loss='fixed', α = 3, N = 3, zero_out", 0.9),
        ("pmixed α = 3, N = 3, zero_out", 0.9),
        ("through the emptied shard, α = 6, N = 1, replace_one", 0.6),
    ],
)
def test_attacks_come_near_their_claims(name: str, least: float) -> None:
    """A claim that is smaller by that much would be broken."""
    for target in (one for one in bounds.targets() if one.name == name):
        assert least < bounds.attack(target, 20, np.random.default_rng(7)) <= 1 + 1e-9


def test_screening_with_a_weight_twice_as_stated_is_broken() -> None:
    mechanism, models = screening.settings()[0]
    stated = math.sqrt(2 * screening_rho(mechanism.screen_weight, mechanism.sigma, models))
    heavier = replace(mechanism, screen_weight=2 * mechanism.screen_weight)
    shifts = [
        screening.measure(screening.passed(one, models, 1500, SeededRandom(6)), 1500)
        for one in (mechanism, heavier)
    ]
    assert 0.6 * stated < shifts[0] <= stated < shifts[1]


def test_a_token_without_a_probability_that_is_drawn_breaks_the_claim() -> None:
    assert sampler._chi_square("lost", [520, 480, 1], [0.52, 0.48, 0.0]).measured == math.inf


def test_divergences_of_the_search() -> None:
    p, q = np.array([[0.6, 0.4, 0.0], [0.5, 0.5, 0.0]]), np.array([[0.5, 0.5, 0.0], [1.0, 0, 0]])
    assert search.renyi(p, q, 2.0).tolist() == [pytest.approx(math.log(1.04)), math.inf]
    assert search.hockey_stick(p, q, 0.0).tolist() == [pytest.approx(0.1), 0.5]
    near = search.renyi(q[:1] + [[1e-7, -1e-7, 0.0]], q[:1], 3.0)
    assert near[0] == pytest.approx(3 / 2 * 4e-14, rel=1e-3)


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
