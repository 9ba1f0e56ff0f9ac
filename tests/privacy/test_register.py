"""The register of an ensemble's ledgers: what it keeps, what adds up, and what it survives."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from privacy_cases import random_losses
from processes import ended, forked, status_of

from adapmixed.cli import main
from adapmixed.privacy import Accountant, BoundedRangeAnswer, ClippedAnswer, IndividualCharge
from adapmixed.privacy import ledger as registers
from adapmixed.privacy.events import Caveat, Event, PublicAnswer, RenyiBound
from adapmixed.privacy.guarantee import format_epsilon
from adapmixed.privacy.ledger import entered, register_of, together
from adapmixed.privacy.planner import recommended

POOL = BoundedRangeAnswer(2.0, -0.25, 1.0, 64, 1, 500)
OTHER = BoundedRangeAnswer(1.0, -0.5, 0.5, 64, 1, 900)
BOX = ClippedAnswer(0.5, 2.0, 64, 1, 100)
SHARE = IndividualCharge("zcdp", None, np.full((64, 1), 1e-6))
COMPOSED, ADDED = "(all answers composed; zero-out)", "(their ε and δ added; zero-out)"


def charge(path: Path, *events: Event, **settings: Any) -> Path:
    """Enter a ledger into the register of the ensemble "e" next to it, and charge it."""
    with Accountant(**{"delta": 1e-5, "path": path} | settings) as accountant:
        accountant.register(path.with_name("e"))
        accountant.add(events)
    return path


@pytest.mark.parametrize(
    ("event", "settings", "words"),
    [
        (POOL, {}, COMPOSED),
        (OTHER, {}, COMPOSED),
        (OTHER, {"adjacency": "replace_one"}, COMPOSED),
        (POOL, {"delta": 1e-6}, f"at δ = 1.1e-05 {ADDED}"),
        (BOX, {}, f"at δ = 2e-05 {ADDED}"),
        (SHARE, {"epsilon": 2.0}, f"at δ = 2e-05 {ADDED}"),
        (random_losses(1, 64), {}, "no ε, as a ledger has none that is fixed in advance."),
    ],
    ids=["one plan twice", "another", "neighbours", "δ", "another family", "budgets", "private"],
)
def test_what_adds_up(event: Event, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    charge(tmp_path / "a.db", POOL)
    first = together(tmp_path / "e")
    assert first.stated.epsilon == first.readings[0].guarantee.epsilon
    assert first.words.endswith("periods, so far: ε = 1.72 at δ = 1e-05 (zero-out).")
    charge(tmp_path / "b.db", event, **settings)
    found = together(tmp_path / "e")
    assert found.words.startswith("All 2 ledgers of this ensemble's periods together, so far: ")
    assert words in found.words
    assert ("This is fixed only if the number of" in found.words) == ("no ε" not in words)
    plain, epsilon = sum(one.guarantee.epsilon or 0 for one in found.readings), found.stated.epsilon
    assert epsilon is None or first.stated.epsilon < epsilon <= np.nextafter(plain, 9)
    if words == COMPOSED and isinstance(event, BoundedRangeAnswer):
        plans = [BoundedRangeAnswer(one.scale, one.lower, one.upper, 64, one.budget or 0)
                 for one in (POOL, event)]  # fmt: skip
        assert epsilon == Accountant(1e-5).add(plans).get_epsilon(1e-5) < plain


def test_lost_and_moved_ledgers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = charge(tmp_path / "a.db", POOL)
    assert "ledgers" not in caplog.text
    second = charge(tmp_path / "b.db", POOL)
    assert f"{second} is one of 2 ledgers of this ensemble's periods" in caplog.text
    moved = first.rename(tmp_path / "c.db")
    lost = f"Not there, counted in full, caveats unknown: {first} (lost or moved)."
    found = together(tmp_path / "e")
    assert lost in found.words and found.stated.delta == 2e-5
    assert found.stated.epsilon == 2 * (found.readings[0].guarantee.epsilon or 0.0)
    charge(tmp_path / "a.db", OTHER)  # another ledger in its place
    assert lost in together(tmp_path / "e").words
    charge(moved, POOL)
    found = together(tmp_path / "e")
    assert found.words.startswith("All 3 ledgers") and "Not there" not in found.words
    assert {Path(one.path) for one in found.readings} == {first, second, moved}
    charge(tmp_path / "d.db", PublicAnswer(1))  # its promise comes with the first private answer
    charge(tmp_path / "d.db", POOL).write_bytes(b"?")
    assert f"unknown: {tmp_path / 'd.db'} (damaged)." in together(tmp_path / "e").words
    way = {"adjacency": "replace_one"}
    charge(tmp_path / "g.db", POOL, **way).unlink()
    twice = Accountant(1e-5, **way).add([POOL]).get_epsilon(1e-5)  # type: ignore[arg-type]
    grown = (together(tmp_path / "e").stated.epsilon or 0.0) - (found.stated.epsilon or 0.0)
    assert grown >= twice > 3.0
    charge(tmp_path / "h.db", POOL, replace(POOL, budget=None)).unlink()  # no promise any more
    assert together(tmp_path / "e").stated.epsilon is None
    charge(tmp_path / "f.db", PublicAnswer(1)).unlink()
    assert together(tmp_path / "e").stated.epsilon is None


def test_too_many_ledgers_have_no_sum(tmp_path: Path) -> None:
    for number in range(10):
        charge(tmp_path / f"{number}.db", BOX, delta=0.1)
    assert "δ of all ledgers add up to 1 or more" in together(tmp_path / "e").words


def test_plans_of_one_order_compose_and_caveats_stay(tmp_path: Path) -> None:
    """PMixED's sum holds for exact mixtures, and has the caveats of all its ledgers."""
    ball, exact = RenyiBound(12.0, 1e-3, 64, 1, budget=100), "for tokens drawn from the exact mix"
    charge(tmp_path / "a.db", ball, Caveat("base"))
    charge(tmp_path / "b.db", replace(ball, epsilon=2e-3, budget=50))
    found = together(tmp_path / "e")
    joint = Accountant(1e-5).add([RenyiBound(12.0, 1e-3, 64, 100), RenyiBound(12.0, 2e-3, 64, 50)])
    assert found.stated.epsilon == joint.get_epsilon(1e-5)
    assert f"(all answers composed; {exact}" in found.words
    assert found.words.count("The public model was not compared") == 1
    charge(tmp_path / "c.db", replace(ball, order=13.0))
    assert f"at δ = 3e-05 (their ε and δ added; {exact}" in together(tmp_path / "e").words


@pytest.mark.parametrize("way", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    "name", [pytest.param("clipped-mixing", marks=pytest.mark.slow), "clipped-log-pool"]
)
def test_ledgers_state_what_their_plan_said(
    name: str, way: str, tmp_path: Path, capsys: Any
) -> None:
    one = recommended(2.0, 1e-5, 64, 100, way, mechanism=name, periods=2)
    family = ClippedAnswer if name == "clipped-mixing" else BoundedRangeAnswer
    event: Any = family(**one.settings, num_models=64, queries=1, budget=100)
    charge(tmp_path / "a.db", event, event, adjacency=way)
    charge(tmp_path / "b.db", event, adjacency=way)
    found, planned = together(tmp_path / "e"), one.over_time[-1][1]
    period = found.readings[0].guarantee.epsilon or 0.0
    assert one.over_time == ((100, one.epsilon), (200, planned)) and planned <= 2.0 < 2 * period
    assert 0.999 * one.epsilon < period <= one.epsilon  # an accountant has a finer grid
    assert found.stated.delta == 1e-5 and 0.999 * planned < (found.stated.epsilon or 0) <= planned
    asked = ["--epsilon=2", "--models=64", "--tokens=100", "--periods=2", f"--mechanism={name}"]
    asked += [f"--adjacency={way}"]
    assert main(["plan", *asked]) == 0
    assert f"All 2 periods have ε = {format_epsilon(planned)} at" in capsys.readouterr().out
    charge(tmp_path / "c.db", replace(event, upper=1.01), adjacency=way)  # not one pair for all
    assert together(tmp_path / "e").stated.delta == (3e-5 if name == "clipped-mixing" else 1e-5)


def test_a_known_ledger_is_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    charge(tmp_path / "a.db", POOL), charge(tmp_path / "b.db", POOL)
    caplog.clear()
    seen: list[Path] = []
    known = registers.entered
    monkeypatch.setattr(registers, "entered", lambda path: seen.append(path) or known(path))
    charge(tmp_path / "a.db", *[POOL] * 50)
    Accountant(1e-5).register(tmp_path / "f")  # in memory: nothing to enter
    assert len(seen) == 1 and caplog.text == "" and not register_of(tmp_path / "f").exists()


def test_processes_at_once_and_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, last = register_of(tmp_path / "e"), tmp_path / "last.db"
    paths = [tmp_path / f"{number}.db" for number in range(6)]
    children = [forked(lambda path=path: charge(path, POOL)) for path in paths]  # type: ignore[misc]
    assert [status_of(child) for child in children] == [0] * 6
    assert len(together(tmp_path / "e").readings) == len(entered(register)) == 6
    modes = [one.stat().st_mode & 0o777 for one in (register.parent, *register.parent.iterdir())]
    assert modes == [0o700, 0o600]
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda old, new: os._exit(9) if new == register else replace(old, new)
    )
    assert ended(lambda: charge(last, POOL)) == 9
    monkeypatch.undo()
    assert len(entered(register)) == 6 and len(os.listdir(register.parent)) == 3
    assert Accountant(1e-5, path=last).queries == 0  # it was to be entered first
    charge(last, POOL)
    assert len(entered(register)) == 7 and len(os.listdir(register.parent)) == 1


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format_version": 1, "ledgers": {}}'])
def test_a_register_that_cannot_be_used(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It stops no answer, it is said once, and what is there stays."""
    register = register_of(tmp_path / "e")
    if text is None:
        register.parent.touch()
    else:
        register.parent.mkdir(mode=0o700)
        register.write_text(text)
    charge(tmp_path / "a.db", POOL, POOL)
    assert caplog.text.count("is in no register, so nothing adds its cost to others") == 1
    if text is not None:
        assert register.read_text() == text
        with pytest.raises(ValueError, match="must be a register of ledgers"):
            together(tmp_path / "e")
