"""Processes that end at every step of a charge and of a creation, and writes that fail.

Nothing is released then, and the ledger must be opened again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from accountant_cases import Offer
from kill_ledger import trials
from ledger_cases import DELTA, answer, ends, file_of, make, plain, state

from adapmixed.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerWriteError,
)
from adapmixed.privacy import Accountant, PublicAnswer, read_ledger
from adapmixed.privacy import ledger as ledgers
from adapmixed.privacy.ledger import Ledger, Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def refuses_until_reopened(ledger: Accountant, path: Path, *, spent: tuple[int, ...]) -> None:
    """Check that a failed second charge allows no more, and that the total is one of `spent`."""
    assert (ledger.charges, ledger.queries) == (1, 1)
    with pytest.raises(LedgerClosedError, match="must be opened again: a charge failed"):
        ledger.add(answer(2))
    ledger.close()
    with Accountant(DELTA, path=path) as again:
        assert again.charges in spent
        again.add(answer(2))
    assert read_ledger(path).charges in {charges + 1 for charges in spent}


def test_a_full_database_is_refused_and_releases_nothing(path: Path) -> None:
    ledger = make(path, 1)
    connection: Any = file_of(ledger)._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerWriteError, match="could not be read or written: .* full"):
        ledger.add(answer(1, models=5) + [PublicAnswer(1)] * 3000)
    refuses_until_reopened(ledger, path, spent=(1,))


def failing(code: int) -> Mock:
    return Mock(side_effect=OSError(code, os.strerror(code)))


def test_a_file_that_may_not_grow_releases_nothing(path: Path) -> None:
    """The kernel refuses a write to the write-ahead log beyond RLIMIT_FSIZE."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with make(path, 0) as ledger:
            resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
            charged = 0
            with pytest.raises(LedgerWriteError, match="could not be read or written"):
                for number in range(100):
                    ledger.add(answer(number))
                    charged += 1
            assert charged > 1
            with pytest.raises(LedgerClosedError):
                ledger.add(answer(0))
            path.with_name("charged").write_text(str(charged))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    assert ends(work) == 0
    charged = int(path.with_name("charged").read_text())
    with Accountant(DELTA, path=path) as ledger:
        assert charged <= ledger.charges <= charged + 1


def as_nobody(work: Callable[[], None]) -> None:
    """Run work without the superuser's rights."""

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        work()

    assert ends(child) == 0


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Return a folder below one that everyone may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


@pytest.mark.parametrize("closed", ["", "-lock", "folder"])
def test_files_that_are_read_only_are_refused(public_folder: Path, closed: str) -> None:
    path = public_folder / "ledger.db"
    if closed != "folder":
        make(path, 2).close()
        for suffix in ("", "-lock"):
            os.chmod(f"{path}{suffix}", 0o444 if suffix == closed else 0o666)
    else:
        public_folder.chmod(0o555)

    def work() -> None:
        with pytest.raises(LedgerWriteError, match="ledger.db"):
            Accountant(DELTA, path=path)

    as_nobody(work)
    if closed != "folder":
        assert read_ledger(path).charges == 2


def test_a_folder_is_no_ledger(tmp_path: Path) -> None:
    for opened in (read_ledger, lambda path: Accountant(DELTA, path=path)):
        with pytest.raises(LedgerWriteError, match=f"{tmp_path} must be .* ledger, got a folder"):
            opened(tmp_path)


def test_a_reader_needs_no_right_to_write_and_leaves_no_file(public_folder: Path) -> None:
    path = public_folder / "ledger.db"
    make(path, 2).close()
    path.chmod(0o444)
    before = sorted(path.parent.iterdir())
    public_folder.chmod(0o555)

    def work() -> None:
        assert read_ledger(path).charges == 2

    as_nobody(work)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("closes", [False, True])
def test_a_writer_that_comes_while_a_closed_ledger_is_read(path: Path, closes: bool) -> None:
    make(path, 2).close()
    writers, seen = [], []

    def charge(record: Record) -> None:
        seen.append(record.sequence)
        if not writers:
            writers.append(Accountant(DELTA, path=path))
            writers[0].add(answer(2))
            if closes:
                writers[0].close()

    assert read_ledger(path, seen=charge).charges == 3
    assert seen == [1, 2, 3]
    writers[0].close()


def test_another_program_that_writes_is_refused(path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("adapmixed.privacy.ledger.BUSY_SECONDS", 0.1)
    ledger = make(path, 1)
    other = sqlite3.connect(path, isolation_level=None)
    with pytest.raises(sqlite3.DatabaseError, match="only ever added to"):
        other.execute("DELETE FROM record")
    with pytest.raises(sqlite3.DatabaseError, match="only ever added to"):
        other.execute("UPDATE record SET sequence = 2")
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusyError, match="is locked by another program"):
        ledger.add(answer(1))
    other.execute("ROLLBACK")
    other.close()
    refuses_until_reopened(ledger, path, spent=(1,))


def test_a_file_system_without_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    with pytest.raises(ValueError, match=f"{path} must lie on a file system with locks"):
        Accountant(DELTA, path=path)
    assert not list(path.parent.iterdir())


def test_a_foreign_record_is_seen_at_once(path: Path) -> None:
    ledger = make(path, 1)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("INSERT INTO record SELECT 2, text, hash FROM record WHERE sequence = 1")
    other.close()
    with pytest.raises(LedgerCorruptError, match="is not an intact ledger"):
        ledger.add(answer(1))
    ledger.close()
    with pytest.raises(LedgerCorruptError, match="record 2 was altered"):
        Accountant(DELTA, path=path)
    with pytest.raises(LedgerCorruptError, match="record 2 was altered"):
        read_ledger(path)


def test_a_charge_of_another_writer_is_seen_at_once(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction compares the totals, in case a writer got past the lock."""
    ledger = make(path, 1)
    with monkeypatch.context() as patched:
        patched.setattr("adapmixed.privacy.ledger._locked", lambda _: os.open(os.devnull, 0))
        with Accountant(DELTA, path=path) as other:
            other.add(answer(1))
    with pytest.raises(LedgerClosedError, match="was charged by another writer"):
        ledger.add(answer(2))
    refuses_until_reopened(ledger, path, spent=(2,))


def test_a_proposal_whose_charge_failed_can_never_be_released(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Accountant(DELTA, path=path) as ledger:
        ledger.charge(Offer(answer(0)))
        failed, late = Offer(answer(1)), Offer(answer(2))
        with monkeypatch.context() as patched:
            patched.setattr(Ledger, "_write", failing(errno.ENOSPC))
            with pytest.raises(OSError):
                ledger.charge(failed)
        with pytest.raises(LedgerClosedError, match="a charge failed"):
            ledger.charge(late)
        assert failed.states == late.states == ["begun", "failed"]
        assert (ledger.queries, ledger.guarantee().queries) == (1, 1)
    with Accountant(DELTA, path=path) as again:
        assert again.queries == 1


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
