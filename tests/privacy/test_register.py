"""The register of an ensemble's ledgers: what it keeps, what adds up, and what it survives."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_cases import ends, exit_status, forked, losses

from adapmixed.privacy import Accountant, BoundedRangeAnswer, ClippedAnswer, IndividualCharge
from adapmixed.privacy.events import Event
from adapmixed.privacy.ledger import register as registers
from adapmixed.privacy.ledger.register import entered, register_of, together

POOL = BoundedRangeAnswer(2.0, -0.25, 1.0, 64, 1, 500)
OTHER = BoundedRangeAnswer(1.0, -0.5, 0.5, 64, 1, 900)
BOX = ClippedAnswer(0.5, 2.0, 64, 1, 100)
SHARE = IndividualCharge("zcdp", None, np.full((64, 1), 1e-6))


def charge(folder: Path, name: str, *events: Event, **settings: Any) -> Path:
    """Enter a ledger into the register of `folder / "e"`, and charge it."""
    path = folder / name
    with Accountant(**{"delta": 1e-5, "path": path} | settings) as accountant:
        accountant.register(folder / "e")
        accountant.add(events)
    return path


@pytest.mark.parametrize(
    ("event", "settings", "words"),
    [
        (POOL, {}, "(all answers composed; zero-out)"),
        (OTHER, {}, "(all answers composed; zero-out)"),
        (OTHER, {"adjacency": "replace_one"}, "(all answers composed; zero-out)"),
        (POOL, {"delta": 1e-6}, "at δ = 1.1e-05 (their ε and δ added; zero-out)"),
        (BOX, {}, "at δ = 2e-05 (their ε and δ added; zero-out)"),
        (SHARE, {"epsilon": 2.0}, "at δ = 2e-05 (their ε and δ added; zero-out)"),
        (losses(1, 64), {}, "one of them has no ε that is fixed in advance, so they have none."),
    ],
    ids=["one plan twice", "another", "neighbours", "δ", "another family", "budgets", "private"],
)
def test_what_adds_up(event: Event, settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    charge(tmp_path, "a.db", POOL)
    first = together(tmp_path / "e")
    assert first.words == "" and first.epsilon == first.readings[0].guarantee.epsilon
    charge(tmp_path, "b.db", event, **settings)
    found = together(tmp_path / "e")
    assert found.words.startswith("All 2 ledgers of this ensemble together, so far: ")
    assert words in found.words
    if found.epsilon is not None:
        plain = sum(float(one.guarantee.epsilon or 0) for one in found.readings)
        assert (first.epsilon or 0) < found.epsilon <= np.nextafter(plain, 9)
    if "composed" in words:
        plans = [BoundedRangeAnswer(one.scale, one.lower, one.upper, 64, one.budget or 0)
                 for one in (POOL, event) if isinstance(one, BoundedRangeAnswer)]  # fmt: skip
        assert found.epsilon == Accountant(1e-5).add(plans).get_epsilon(1e-5)


def test_lost_and_moved_ledgers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = charge(tmp_path, "a.db", POOL)
    assert "ledgers" not in caplog.text
    second = charge(tmp_path, "b.db", POOL)
    assert f"{second} is one of 2 ledgers of this ensemble, whose costs add up" in caplog.text
    moved = first.rename(tmp_path / "c.db")
    lost = f"Not counted, because they are lost or moved: {first}."
    assert lost in together(tmp_path / "e").words
    charge(tmp_path, "a.db", OTHER)  # another ledger in its place
    assert lost in together(tmp_path / "e").words
    charge(tmp_path, "c.db", POOL)
    found = together(tmp_path / "e")
    assert found.words.startswith("All 3 ledgers") and "Not counted" not in found.words
    assert {Path(one.path) for one in found.readings} == {first, second, moved}
    caplog.clear()
    charge(tmp_path, "b.db", POOL)  # known: nothing is announced or written
    assert caplog.text == ""


def test_processes_at_once_and_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = register_of(tmp_path / "e")
    children = [
        forked(lambda name=f"{number}.db": charge(tmp_path, name, POOL))  # type: ignore[misc]
        for number in range(6)
    ]
    assert [exit_status(child) for child in children] == [0] * 6
    assert len(entered(register)) == 6 == len(together(tmp_path / "e").readings)
    assert (register.stat().st_mode & 0o777, register.parent.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    replace = os.replace

    def die(*paths: Any) -> None:
        if Path(paths[1]) == register:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    monkeypatch.setattr(os, "replace", die)
    assert ends(lambda: charge(tmp_path, "last.db", POOL)) == -signal.SIGKILL
    monkeypatch.undo()
    assert len(entered(register)) == 6 and len(os.listdir(register.parent)) == 3
    with Accountant(1e-5, path=tmp_path / "last.db") as accountant:
        assert accountant.queries == 0  # it is entered first
    charge(tmp_path, "last.db", POOL)
    assert len(entered(register)) == 7 and len(os.listdir(register.parent)) == 2


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format_version": 2, "ledgers": {}}'])
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
    with Accountant(1e-5, path=tmp_path / "a.db") as accountant:
        accountant.register(tmp_path / "e")
        accountant.add(POOL).add(POOL)
    assert caplog.text.count("is in no register, so nothing adds its cost to others") == 1
    if text is not None:
        assert register.read_text() == text
        with pytest.raises(ValueError, match="must be a register of ledgers"):
            together(tmp_path / "e")


def test_a_charge_does_not_look_at_the_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    known = registers.entered
    monkeypatch.setattr(registers, "entered", lambda path: seen.append(path) or known(path))
    charge(tmp_path, "a.db", POOL)
    assert len(seen) == 2
    charge(tmp_path, "a.db", *[POOL] * 50)
    assert len(seen) == 3
    Accountant(1e-5).register(tmp_path / "f")  # in memory: nothing to enter
    assert len(seen) == 3 and not register_of(tmp_path / "f").parent.exists()
