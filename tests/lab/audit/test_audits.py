"""Each audit, small, and ``adapmixed-lab audit``: what is broken is called so and ends with 1."""

import math
from typing import Any

import numpy as np
import pytest

from adapmixed_lab.audit import AUDITS, Effort, Finding, bounds, run, sampler, search
from adapmixed_lab.cli import main

# How near attacks come to the claims whose name holds these words: one that is smaller by that much
# would be broken.
NEAR = {
    "tokens": {"N = 2": 0.5},
    "bounds": {"": 0.4, "emptied shard, α = 6": 0.85, "zero_out": 0.9, "clipped-mixing": 0.99,
               "adapmixed α": 0.9999},
    "screening": {"": 0.5},
    "budgets": {"": 0.5, "extremal": 0.98},
    "adversary": {"": 0.8, "plan": 0.89},
    "odometer": {"": 0.96, "18, an": 0.99, "8, an": 0.99},
    "synthesis": {"": 0.6, "zero_out": 0.8},
}  # fmt: skip
QUICK = ("bounds", "screening", "odometer")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in AUDITS]
)
def test_an_audit_passes_and_comes_near_its_claims(name: str) -> None:
    findings = list(run([name], Effort(3.0 if name in QUICK else 1.0, 1)))
    assert [f for f in findings if f.verdict not in ("holds", "caught")] == []
    assert {f.audit for f in findings} == {name}
    assert any(f.control for f in findings) and not all(f.control for f in findings)
    for words, least in NEAR.get(name, {}).items():
        about = (f for f in findings if words in f.name and not f.control)
        ratios = [f.ratio for f in about if f.ratio is not None]
        assert ratios and min(ratios) > least, words


def finding(measured: float, control: bool) -> Finding:
    return Finding("tokens", "b", "c", 1.0, measured, 0.999, control)


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
def test_verdicts(
    measured: float,
    control: bool,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    findings = [finding(0.9, False), finding(measured, control)]
    monkeypatch.setattr("adapmixed_lab.audit.tokens.audit", lambda effort: iter(findings))
    assert main(["audit", "tokens"]) == (verdict not in ("holds", "caught"))
    assert f"  {verdict}" in capsys.readouterr().out and findings[1].verdict == verdict


@pytest.mark.parametrize("number", [0, 4])
def test_a_probability_that_is_no_number_breaks_a_claim(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution = search.distribution

    def answers(*arguments: Any) -> search.Array:
        probabilities = distribution(*arguments)
        probabilities[0, 0] = math.nan
        return probabilities

    monkeypatch.setattr(search, "distribution", answers)
    assert bounds.attack(bounds.targets()[number], 2, np.random.default_rng(0)) == math.inf


def test_a_token_without_a_probability_that_is_drawn_breaks_the_claim() -> None:
    assert sampler._chi_square("lost", [520, 480, 1], [0.52, 0.48, 0.0]).measured == math.inf


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "screening", "--seconds", "0.5", "--seed", "2"]) == 0
    printed = capsys.readouterr().out
    assert "BROKEN" not in printed and "caught      control: " in printed
    assert printed.endswith("\n3 of 3 claims hold, 1 of 1 controls are caught\n")
    for arguments, message in (
        (["nothing"], "NAME must be one of tokens"),
        (["--seconds", "0"], "seconds must be > 0"),
        (["--seconds", "nan"], "seconds must be > 0"),
        (["--seed", "-1"], "--seed must be >= 0, got -1"),
    ):
        assert main(["audit", *arguments]) == 2
        assert message in capsys.readouterr().err
