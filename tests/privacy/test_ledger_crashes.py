"""Processes that end at every step of a charge and of a creation."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accountant_cases import Offer
from kill_ledger import trials
from ledger_cases import DELTA, answer, ends, file_of, make, plain, state

from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy import ledger as ledgers
from adapmixed.privacy.ledger import Ledger


def die(*arguments: object, **named: object) -> Any:
    """End the process as a kill does: nothing is closed, flushed or undone."""
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the given one and then ends the process."""
    return lambda *arguments, **named: (function(*arguments, **named), die())


class Statements:
    """A connection that ends the process before or after one statement."""

    def __init__(self, connection: Any, statement: str, *, first: bool) -> None:
        self._connection, self._statement, self._first = connection, statement, first

    def execute(self, statement: str, *arguments: Any) -> Any:
        chosen = statement.startswith(self._statement)
        if chosen and self._first:
            die()
        result = self._connection.execute(statement, *arguments)
        return die() if chosen else result


def statement(text: str, *, first: bool = False) -> Callable[[Accountant], None]:
    def step(ledger: Accountant) -> None:
        opened = file_of(ledger)
        connection: Any = Statements(opened._connection, text, first=first)
        opened._connection = connection

    return step


def replaced(owner: Any, name: str, function: Any) -> Callable[[object], None]:
    return lambda _: setattr(owner, name, function)


RENAME = os.rename

# Step of a charge -> how the process ends there, and True if the charge must be found.
CHARGE: dict[str, tuple[Callable[[Accountant], None], bool]] = {
    "before the record": (replaced(Ledger, "_write", die), False),
    "after begin": (statement("BEGIN"), False),
    "after insert": (statement("INSERT"), False),
    "before the totals": (statement("UPDATE", first=True), False),
    "after the totals": (statement("UPDATE"), False),
    "before commit": (statement("COMMIT", first=True), False),
    "after commit": (statement("COMMIT"), True),
}


@pytest.mark.parametrize("charges", [0, 2])
@pytest.mark.parametrize("name", list(CHARGE))
def test_a_process_that_ends_amid_a_charge(tmp_path: Path, name: str, charges: int) -> None:
    path = tmp_path / "ledger.db"
    step, counted = CHARGE[name]

    def work() -> None:
        ledger = make(path, charges)
        step(ledger)
        ledger.add(answer(charges))
        path.with_name("released").write_text("x")

    assert ends(work) == -signal.SIGKILL
    assert not path.with_name("released").exists()
    reading = read_ledger(path)
    assert reading.charges == charges + counted
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == ledger.queries == charges + counted
        assert state(ledger) == state(plain(charges + counted)) == state(reading.account)
        ledger.add(answer(charges + counted))
    assert read_ledger(path).charges == charges + counted + 1


@pytest.mark.parametrize("at", ["the binding", "the charge"])
def test_a_process_that_ends_within_the_first_charge_of_a_proposal(tmp_path: Path, at: str) -> None:
    """The binding is an earlier record. It still binds when found, and nothing was spent."""
    path = tmp_path / "ledger.db"
    later = int(at == "the charge")

    def work() -> None:
        write, seen = Ledger._write, []

        def counted(*arguments: Any) -> None:
            seen.append(write(*arguments))  # type: ignore[func-returns-value]
            if len(seen) == 1 + later:
                die()

        Ledger._write = counted  # type: ignore[method-assign]
        Accountant(DELTA, path=path).charge(Offer(answer(0)))

    assert ends(work) == -signal.SIGKILL
    reading = read_ledger(path)
    assert (reading.charges, reading.account.queries) == (1 + later, later)
    with Accountant(DELTA, path=path) as ledger:
        with pytest.raises(ValueError, match="must be charged for what it is bound to"):
            ledger.charge(Offer(answer(0, 6), models=6))
        ledger.charge(Offer(answer(1)))
        assert ledger.queries == 1 + later
    assert read_ledger(path).charges == 2 + later


CREATION: dict[str, Callable[[object], None]] = {
    "before the database": replaced(ledgers, "_create", die),
    "before its name": replaced(ledgers.os, "rename", die),
    "after its name": replaced(ledgers.os, "rename", after(RENAME)),
    "before its name is durable": replaced(ledgers, "flush", die),
    "after the database": replaced(ledgers, "_create", after(ledgers._create)),
}


@pytest.mark.parametrize("name", list(CREATION))
def test_a_process_that_ends_amid_the_creation(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ledger.db"

    def work() -> None:
        CREATION[name](None)
        make(path, 1)

    for _ in range(2):
        child = ends(work)
        assert child == -signal.SIGKILL or (child == 0 and path.exists())
    with Accountant(DELTA, path=path) as ledger:
        before = ledger.charges
        ledger.add(answer(before))
    assert read_ledger(path).charges == before + 1


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    found, charges = trials(200, tmp_path, seed=int.from_bytes(os.urandom(4), "little"))
    between = sum(times for how, times in found.items() if how.startswith("charged, not released"))
    assert sum(found.values()) == 200 and charges > 200
    assert between >= 20 and found["all released"] >= 20, found
