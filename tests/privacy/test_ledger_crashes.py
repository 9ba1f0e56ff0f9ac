"""Processes that end at every step of a charge, of a creation and of a repair."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_ledger import trials
from ledger_cases import SETTINGS, answer, exit_status, forked, make

from adapmixed.privacy import Ledger
from adapmixed.privacy.ledger import head as heads
from adapmixed.privacy.ledger import ledger as ledgers
from adapmixed.privacy.ledger import store as stores
from adapmixed.privacy.ledger.head import HeadFile
from adapmixed.privacy.ledger.store import Store


def die(*arguments: object, **named: object) -> Any:
    """Ends the process as a kill does: nothing is closed, flushed or undone."""
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, then the end."""
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


def statement(text: str, *, first: bool = False) -> Callable[[Ledger], None]:
    def step(ledger: Ledger) -> None:
        connection: Any = Statements(ledger._store._connection, text, first=first)
        ledger._store._connection = connection

    return step


def replaced(owner: Any, name: str, function: Any) -> Callable[[object], None]:
    return lambda _: setattr(owner, name, function)


def half_written(file: int, data: bytes, offset: int) -> int:
    PWRITE(file, data[: len(data) // 2], offset)
    return int(die())


def torn(file: int, data: bytes, offset: int) -> int:
    """Not what a kill does: half of a slot, the rest of it lost, as when the power fails."""
    PWRITE(file, data[:40] + b"\xff" * (len(data) - 40), offset)
    return int(die())


PWRITE, RENAME = os.pwrite, os.rename

# Step of a charge -> (how the process ends there, whether the charge must be found).
CHARGE: dict[str, tuple[Callable[[Ledger], None], bool]] = {
    "before the record": (replaced(Store, "append", die), False),
    "after begin": (statement("BEGIN"), False),
    "after insert": (statement("INSERT"), False),
    "before commit": (statement("COMMIT", first=True), False),
    "after commit": (statement("COMMIT"), True),
    "before the head": (replaced(HeadFile, "write", die), True),
    "before writing the head": (replaced(heads.os, "pwrite", die), True),
    "amid writing the head": (replaced(heads.os, "pwrite", half_written), True),
    "torn head": (replaced(heads.os, "pwrite", torn), True),
    "before flushing the head": (replaced(heads, "flush", die), True),
    "after flushing the head": (replaced(heads, "flush", after(heads.flush)), True),
    "after the head": (replaced(HeadFile, "write", after(HeadFile.write)), True),
}


@pytest.mark.parametrize("charges", [0, 1, 2])
@pytest.mark.parametrize("name", list(CHARGE))
def test_a_process_that_ends_amid_a_charge(tmp_path: Path, name: str, charges: int) -> None:
    path = tmp_path / "ledger.db"
    step, counted = CHARGE[name]

    def work() -> None:
        ledger = make(path, charges)
        step(ledger)
        ledger.charge(answer(charges))
        path.with_name("released").write_text("x")

    assert exit_status(forked(work)) == -signal.SIGKILL
    assert not path.with_name("released").exists()
    reading = Ledger.verify(path)
    assert reading.charges == charges + counted
    with Ledger.open(path, **SETTINGS) as ledger:
        assert ledger.charges == ledger.totals.queries == charges + counted
        ledger.charge(answer(charges + counted))
    reading = Ledger.verify(path)
    assert (reading.charges, reading.behind) == (charges + counted + 1, 0)


CREATION: dict[str, Callable[[object], None]] = {
    "empty head": replaced(HeadFile, "initialise", die),
    "half a head": replaced(heads.os, "pwrite", half_written),
    "before the head's name is durable": replaced(ledgers, "flush_folder", die),
    "before the database": replaced(ledgers, "create_database", die),
    "before its name": replaced(stores.os, "rename", die),
    "after its name": replaced(stores.os, "rename", after(RENAME)),
    "before its name is durable": replaced(stores, "flush_folder", die),
    "after the database": replaced(ledgers, "create_database", after(stores.create_database)),
}


@pytest.mark.parametrize("name", list(CREATION))
def test_a_process_that_ends_amid_the_creation(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ledger.db"

    def work() -> None:
        CREATION[name](None)
        make(path, 1)

    for _ in range(2):
        child = exit_status(forked(work))
        assert child == -signal.SIGKILL or (child == 0 and path.exists())
    with Ledger.open(path, **SETTINGS) as ledger:
        before = ledger.charges
        ledger.charge(answer(before))
    assert Ledger.verify(path).charges == before + 1


REPAIR: dict[str, Callable[[object], None]] = {
    "before settling": replaced(Store, "settle", die),
    "after settling": replaced(Store, "settle", after(Store.settle)),
    "before the head": replaced(HeadFile, "write", die),
    "torn head": replaced(heads.os, "pwrite", torn),
    "after the head": replaced(HeadFile, "write", after(HeadFile.write)),
}


@pytest.mark.parametrize("name", list(REPAIR))
def test_a_process_that_ends_amid_a_repair(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ledger.db"

    def charge() -> None:
        ledger = make(path, 2)
        HeadFile.write = die  # type: ignore[method-assign]
        ledger.charge(answer(2))

    def repair() -> None:
        REPAIR[name](None)
        Ledger.open(path, **SETTINGS)

    assert exit_status(forked(charge)) == -signal.SIGKILL
    assert (Ledger.verify(path).charges, Ledger.verify(path).behind) == (3, 1)
    assert exit_status(forked(repair)) == -signal.SIGKILL
    with Ledger.open(path, **SETTINGS) as ledger:
        assert ledger.charges == 3
    assert Ledger.verify(path).behind == 0


def test_kills_at_random_moments(tmp_path: Path) -> None:
    found, charges = trials(200, tmp_path, seed=int.from_bytes(os.urandom(4), "little"))
    between = sum(times for how, times in found.items() if how.startswith("charged, not released"))
    assert sum(found.values()) == 200 and charges > 200
    assert between >= 20 and found["all released"] >= 20, found
