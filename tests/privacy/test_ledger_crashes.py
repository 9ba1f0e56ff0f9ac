"""Processes that end at every step of a charge, of a creation and of a repair."""

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

from adapmixed.errors import LedgerBusyError, LedgerCorruptError
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy.ledger import database as databases
from adapmixed.privacy.ledger import head as heads
from adapmixed.privacy.ledger import writer
from adapmixed.privacy.ledger.head import HeadFile
from adapmixed.privacy.ledger.store import Store


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
        store = file_of(ledger)._store
        connection: Any = Statements(store._connection, text, first=first)
        store._connection = connection

    return step


def replaced(owner: Any, name: str, function: Any) -> Callable[[object], None]:
    return lambda _: setattr(owner, name, function)


def cut(length: int) -> Callable[[int, bytes, int], int]:
    """Return a write that ends the process after so many bytes; the older bytes stay behind."""

    def pwrite(file: int, data: bytes, offset: int) -> int:
        PWRITE(file, data[:length], offset)
        return int(die())

    return pwrite


def torn(file: int, data: bytes, offset: int) -> int:
    """Write the start of a slot and lose the rest, as a power failure may; end the process."""
    PWRITE(file, data[:40] + b"\xff" * (len(data) - 40), offset)
    return int(die())


PWRITE, RENAME = os.pwrite, os.rename

# Step of a charge -> (how the process ends there, True if the charge must be found in the database,
# True if in the head).
CHARGE: dict[str, tuple[Callable[[Accountant], None], bool, bool]] = {
    "before the record": (replaced(Store, "append", die), False, False),
    "after begin": (statement("BEGIN"), False, False),
    "after insert": (statement("INSERT"), False, False),
    "before the checkpoint": (statement("UPDATE", first=True), False, False),
    "after the checkpoint": (statement("UPDATE"), False, False),
    "before commit": (statement("COMMIT", first=True), False, False),
    "after commit": (statement("COMMIT"), True, False),
    "before the head": (replaced(HeadFile, "write", die), True, False),
    "before writing the head": (replaced(heads.os, "pwrite", die), True, False),
    # Within the number of charges, within the hash, without the end of the checksum.
    "a head cut at 25 bytes": (replaced(heads.os, "pwrite", cut(25)), True, False),
    "a head cut at 60 bytes": (replaced(heads.os, "pwrite", cut(60)), True, False),
    "a head cut at 153 bytes": (replaced(heads.os, "pwrite", cut(153)), True, False),
    "torn head": (replaced(heads.os, "pwrite", torn), True, False),
    "before flushing the head": (replaced(heads, "flush", die), True, True),
    "after flushing the head": (replaced(heads, "flush", after(heads.flush)), True, True),
    "after the head": (replaced(HeadFile, "write", after(HeadFile.write)), True, True),
}


@pytest.mark.parametrize("charges", [0, 1, 2])
@pytest.mark.parametrize("name", list(CHARGE))
@pytest.mark.slow
def test_a_process_that_ends_amid_a_charge(tmp_path: Path, name: str, charges: int) -> None:
    path = tmp_path / "ledger.db"
    step, counted, told = CHARGE[name]

    def work() -> None:
        ledger = make(path, charges)
        step(ledger)
        ledger.add(answer(charges))
        path.with_name("released").write_text("x")

    assert ends(work) == -signal.SIGKILL
    assert not path.with_name("released").exists()
    reading = read_ledger(path)
    assert (reading.charges, reading.behind) == (charges + counted, counted - told)
    assert (reading.warning is not None) == ("torn" in name or "cut" in name)
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == ledger.queries == charges + counted
        assert state(ledger) == state(plain(charges + counted)) == state(reading.account)
        ledger.add(answer(charges + counted))
    reading = read_ledger(path)
    assert (reading.charges, reading.behind) == (charges + counted + 1, 0)


@pytest.mark.parametrize("at", ["the binding", "the charge"])
def test_a_process_that_ends_within_the_first_charge_of_a_proposal(tmp_path: Path, at: str) -> None:
    """The binding is an earlier record. It still binds when found, and nothing was spent."""
    path = tmp_path / "ledger.db"
    later = int(at == "the charge")

    def work() -> None:
        append, seen = Store.append, []

        def counted(*arguments: Any) -> None:
            seen.append(append(*arguments))  # type: ignore[func-returns-value]
            if len(seen) == 1 + later:
                die()

        Store.append = counted  # type: ignore[method-assign]
        Accountant(DELTA, path=path).charge(Offer(answer(0)))

    assert ends(work) == -signal.SIGKILL
    reading = read_ledger(path)
    assert (reading.charges, reading.account.totals.queries) == (1 + later, later)
    with Accountant(DELTA, path=path) as ledger:
        with pytest.raises(ValueError, match="must be charged for what it is bound to"):
            ledger.charge(Offer(answer(0, 6), models=6))
        ledger.charge(Offer(answer(1)))
        assert ledger.queries == 1 + later
    assert (read_ledger(path).charges, read_ledger(path).behind) == (2 + later, 0)


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is called for the database only; the head is renamed as usual."""
    return lambda *names: (RENAME if names[1].endswith("-head") else function)(*names)


CREATION: dict[str, Callable[[object], None]] = {
    "empty head": replaced(heads.os, "pwrite", die),
    "half a head": replaced(heads.os, "pwrite", cut(4096)),
    "before the head is durable": replaced(heads, "flush", die),
    "before the head's name": replaced(heads.os, "rename", die),
    "before the head's name is durable": replaced(heads, "flush_folder", die),
    "before the database": replaced(writer, "create_database", die),
    "before its name": replaced(databases.os, "rename", named(die)),
    "after its name": replaced(databases.os, "rename", named(after(RENAME))),
    "before its name is durable": replaced(databases, "flush_folder", die),
    "after the database": replaced(writer, "create_database", after(databases.create_database)),
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


LENGTHS = [0, 1, 23, 24, 25, 60, 90, 153, 154, 155, 1000, 4095, 4096, 4097, 4250, 8191]


@pytest.mark.slow
def test_a_head_that_was_cut_at_its_creation_is_made_anew(tmp_path: Path) -> None:
    for length in LENGTHS:
        path = tmp_path / f"{length}.db"

        def work(path: Path = path, length: int = length) -> None:
            heads.os.pwrite = cut(length)
            make(path, 0)

        assert ends(work) == -signal.SIGKILL
        assert Path(f"{path}-head-new").stat().st_size == length
        works_from_zero(path)
    for number, content in enumerate((bytes(8192), bytes(100), b"\xff" * 9000)):  # a lost write
        path = tmp_path / f"lost-{number}.db"
        Path(f"{path}-head-new").write_bytes(content)
        works_from_zero(path)


def works_from_zero(path: Path) -> None:
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == 0
        ledger.add(answer(0))
    assert (read_ledger(path).charges, read_ledger(path).behind) == (1, 0)
    assert not list(path.parent.glob(f"{path.name}*-new"))


@pytest.mark.parametrize("database", [True, False])
@pytest.mark.parametrize("charges", [0, 1, 2])
def test_a_head_that_is_cut_later_is_refused(tmp_path: Path, charges: int, database: bool) -> None:
    path = tmp_path / "ledger.db"
    make(path, charges).close()
    head = Path(f"{path}-head")
    content = head.read_bytes()
    if not database:
        path.unlink()
    for spoilt in (*(content[:length] for length in LENGTHS), bytes(8192)):
        head.write_bytes(spoilt)
        with pytest.raises(LedgerCorruptError, match="must hold a whole head, got"):
            Accountant(DELTA, path=path)
        assert head.read_bytes() == spoilt and path.exists() == database


def test_a_missing_database_is_forgiven_an_untouched_head_alone(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    make(path, 0).close()
    path.unlink()
    works_from_zero(path)
    # The slot of the first charge was spoilt later; the other still says 0.
    path.unlink()
    head = Path(f"{path}-head")
    content = bytearray(head.read_bytes())
    content[4096 + 30] ^= 1
    head.write_bytes(content)
    assert heads.read_head(str(head)).count == 0
    with pytest.raises(LedgerCorruptError, match="is not as it was made"):
        Accountant(DELTA, path=path)
    assert head.read_bytes() == content


def test_whoever_is_late_to_a_creation_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    held = HeadFile(f"{path}-head-new", empty=True)
    with pytest.raises(LedgerBusyError, match="is held by another writer"):
        Accountant(DELTA, path=path)
    held.close()
    make(path, 1).close()
    with pytest.raises(LedgerBusyError, match="made by another writer at the same time"):
        HeadFile.create(f"{path}-head", heads.Head(0, bytes(32)))
    assert read_ledger(path).charges == 1 and not Path(f"{path}-head-new").exists()


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
        ledger.add(answer(2))

    def repair() -> None:
        REPAIR[name](None)
        Accountant(DELTA, path=path)

    assert ends(charge) == -signal.SIGKILL
    assert (read_ledger(path).charges, read_ledger(path).behind) == (3, 1)
    assert ends(repair) == -signal.SIGKILL
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == 3
    assert read_ledger(path).behind == 0


@pytest.mark.slow
def test_kills_at_random_moments(tmp_path: Path) -> None:
    found, charges = trials(200, tmp_path, seed=int.from_bytes(os.urandom(4), "little"))
    between = sum(times for how, times in found.items() if how.startswith("charged, not released"))
    assert sum(found.values()) == 200 and charges > 200
    assert between >= 20 and found["all released"] >= 20, found
