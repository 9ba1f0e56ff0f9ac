"""Processes that end at every step of a creation and a charge, and files that cannot be written.

Nothing is released then, and the ledger must be opened again.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from privacy_cases import DELTA, answer, charged, offer, state
from processes import ended, killed_before

from adapmixed.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerWriteError,
)
from adapmixed.privacy import Accountant, read_ledger
from adapmixed.privacy import ledger as ledgers
from adapmixed.privacy.ledger import Record


class Marked(sqlite3.Connection):
    """A connection whose changes are each followed by a call that kills a process."""

    def execute(self, *values: Any) -> sqlite3.Cursor:
        cursor = super().execute(*values)
        if not values[0].startswith(("SELECT", "PRAGMA")):
            os.getppid()
        return cursor


def offered(number: int, epsilon: float | None, models: int = 3) -> Any:
    """Return a ticket, under a budget with a charge of each member."""
    if epsilon is None:
        return offer(answer(number, models), models=models)
    return offer(charges=np.random.default_rng(number).exponential(2e-3, (models, 1)))


@pytest.mark.parametrize("epsilon", [pytest.param(None, marks=pytest.mark.slow), 1.0])
def test_a_process_that_ends_at_any_step(tmp_path: Path, epsilon: float | None) -> None:
    """Of a creation, a binding and charges: all that was released is charged, one query at most
    is charged and not released, and the ledger goes on with the same bits."""
    outcomes = Counter[str]()
    for number in range(1, 200):
        path, released = tmp_path / f"{number}.db", tmp_path / f"{number}.released"

        def work(path: Path = path, released: Path = released) -> None:
            sqlite3.connect = functools.partial(sqlite3.connect, factory=Marked)  # type: ignore
            ledger = Accountant(DELTA, epsilon=epsilon, path=path)
            with open(released, "ab", buffering=0) as file:
                for query in range(2):
                    ledger.charge(offered(query, epsilon))
                    file.write(b"x")

        status = killed_before(work, number, ("replace", "fsync", "unlink", "getppid"))
        answers = len(released.read_bytes()) if released.exists() else 0
        if status == 0:
            assert answers == 2
            break
        assert status == -signal.SIGKILL
        queries, named = 0, path.exists()
        if named:
            reading = read_ledger(path)
            queries = reading.account.queries
            outcomes["bound, nothing charged"] += reading.charges == 1
        outcomes[f"{queries} charged, {answers} released" if named else "no name yet"] += 1
        assert answers <= queries <= answers + 1
        with Accountant(DELTA, epsilon=epsilon, path=path) as ledger:
            assert ledger.queries == queries
            assert named or not [*tmp_path.glob(f".tmp-{path.name}-*")]
            if ledger.charges:
                with pytest.raises(ValueError, match="must be charged for what it is bound to"):
                    ledger.charge(offered(9, epsilon, models=6))
            for query in range(queries, 3):
                ledger.charge(offered(query, epsilon))
            whole = Accountant(DELTA, epsilon=epsilon)
            for query in range(3):
                whole.charge(offered(query, epsilon))
            assert state(ledger) == state(whole) == state(read_ledger(path).account)
    assert status == 0 and all(
        outcomes[label]
        for label in ("no name yet", "bound, nothing charged", "1 charged, 0 released",
                      "1 charged, 1 released", "2 charged, 1 released")
    ), outcomes  # fmt: skip


def test_a_full_disk_releases_nothing(path: Path) -> None:
    """The kernel refuses a write to the write-ahead log beyond RLIMIT_FSIZE."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        ledger, paid = Accountant(DELTA, path=path), 0
        tickets = [offer(answer(number)) for number in range(100)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
        with pytest.raises(LedgerWriteError, match="could not be read or written"):
            for paid in range(100):
                ledger.charge(tickets[paid])
        with pytest.raises(LedgerClosedError, match="must be opened again: a charge failed"):
            ledger.charge(tickets[-1])
        for ticket in (tickets[paid], tickets[-1]):
            with pytest.raises(ValueError, match="its charge failed"):
                ticket.release()
        assert ledger.queries == ledger.guarantee().queries == paid
        path.with_name(f"charged {paid}").touch()

    assert ended(work) == 0
    (mark,) = path.parent.glob("charged *")
    paid = int(mark.name.split()[1])
    with Accountant(DELTA, path=path) as again:
        assert 1 < paid <= again.queries <= paid + 1
        again.charge(offer(answer(0)))
        assert read_ledger(path).charges == again.charges == again.queries + 1


def as_nobody(work: Callable[[], object]) -> None:
    """Run work without the superuser's rights."""

    def child() -> None:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        work()

    assert ended(child) == 0


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """Return a folder below one that everyone may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    folder.chmod(0o777)
    shutil.rmtree(folder)


def test_files_that_are_read_only_are_refused(public_folder: Path) -> None:
    """A reader needs the right to write to the folder alone, where SQLite puts an index."""
    path = public_folder / "ledger.db"

    def refused() -> None:
        with pytest.raises(LedgerWriteError, match="ledger.db"):
            Accountant(DELTA, path=path)

    def read_and_refused() -> None:
        reading = read_ledger(path)
        assert reading.charges == len([*reading.records()]) - 1 == 2
        refused()

    public_folder.chmod(0o555)
    as_nobody(refused)
    charged(2, path=path).close()
    path.chmod(0o444)
    as_nobody(refused)
    public_folder.chmod(0o777)  # then the file alone is read-only
    as_nobody(read_and_refused)


def test_a_writer_that_comes_while_a_ledger_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers see one state, and neither they nor the writer wait."""
    charged(2, path=path).close()

    def charge(record: Record, before: Record | None) -> None:
        monkeypatch.undo()
        charged(1, path=path).close()

    monkeypatch.setattr(Record, "check_after", charge)
    reading = read_ledger(path)
    records = reading.records()
    assert [next(records).sequence for _ in range(2)] == [0, 1]
    charged(2, path=path).close()
    assert reading.charges == 2 and [record.sequence for record in records] == [2]
    assert read_ledger(path).charges == 5


def test_other_writers_are_refused_or_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program that holds the file, a record of its own, and a writer past the lock."""
    monkeypatch.setattr(ledgers, "BUSY_SECONDS", 0.1)
    ledger, other = charged(1, path=path), sqlite3.connect(path, isolation_level=None)
    for change in ("DELETE FROM record", "UPDATE record SET sequence = 2", "DELETE FROM totals"):
        with pytest.raises(sqlite3.DatabaseError, match="only ever added to"):
            other.execute(change)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(LedgerBusyError, match="is locked by another program"):
        ledger.add(answer(1))
    other.execute("ROLLBACK")
    other.close()
    with pytest.raises(LedgerClosedError, match="must be opened again: a charge failed"):
        ledger.add(answer(1))
    ledger.close()

    ledger = Accountant(DELTA, path=path)
    assert (ledger.charges, ledger.queries) == (1, 1)
    ledger.add(answer(2))
    with monkeypatch.context() as patched:
        patched.setattr(ledgers, "sole_writer", nullcontext)
        with Accountant(DELTA, path=path) as second:
            second.add(answer(1))
    with pytest.raises(LedgerClosedError, match="was charged by another writer"):
        ledger.add(answer(2))
    with closing(sqlite3.connect(path, timeout=0)) as other:
        other.execute("BEGIN IMMEDIATE")  # no lock stays
    ledger.close()
    assert read_ledger(path).charges == 3

    ledger, other = Accountant(DELTA, path=path), sqlite3.connect(path, isolation_level=None)
    other.execute("INSERT INTO record SELECT 4, text, hash FROM record WHERE sequence = 1")
    other.close()
    with pytest.raises(LedgerCorruptError, match="is not an intact ledger"):
        ledger.add(answer(1))
    ledger.close()
    for look in (lambda: Accountant(DELTA, path=path), lambda: read_ledger(path)):
        with pytest.raises(LedgerCorruptError, match="record 4 was altered"):
            look()
    for code in (sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_FULL, sqlite3.SQLITE_INTERRUPT):
        late = sqlite3.OperationalError("the file may be intact")
        late.sqlite_errorcode = code
        with pytest.raises(LedgerWriteError, match="read or written"), ledgers.translated("a"):
            raise late


def test_what_cannot_keep_a_ledger_gets_no_files(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system without locks, and a database that does not wait for the device."""
    refused = Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)))
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", refused)
        with pytest.raises(ValueError, match=f"{path} must lie on a file system with locks"):
            Accountant(DELTA, path=path)
    for setting in ({"synchronous": 9}, {"journal_mode": "none"}):
        monkeypatch.setattr(ledgers, "_DURABLE", setting)
        with pytest.raises(LedgerWriteError, match="must lie on a local file system: .* refuses"):
            Accountant(DELTA, path=path)
    assert not list(path.parent.iterdir())
