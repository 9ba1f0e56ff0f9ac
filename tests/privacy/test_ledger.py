"""A ledger that is opened again has the same totals; charges are durable; there is one writer."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from privacy_cases import BOXED, DELTA, POOLED, TOTALS, answer, charged, copy, offer, state
from processes import ended, forked, status_of

from adapmixed.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerMismatchError,
    LedgerWriteError,
)
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant, PublicAnswer, read_ledger
from adapmixed.privacy import ledger as ledgers
from adapmixed.privacy.events import Binding


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.mark.parametrize("case", TOTALS)
def test_totals_are_read_back_in_every_bit(case: str, path: Path) -> None:
    """From a ledger that is opened for each charge, and from a state."""
    settings, events = TOTALS[case]
    whole = Accountant(DELTA, **settings)
    for number in range(5):
        again = Accountant.from_state(json.loads(json.dumps(whole.state(), allow_nan=False)))
        with Accountant(DELTA, path=path, **settings) as ledger:
            assert state(again) == state(ledger) == state(whole)
            several = events(number)
            if case == "unprotected":  # no ledger takes seeded answers
                several = several[:1] + several[2:]
            for one in (whole, again, ledger):
                one.add(several)
            assert again.state() == whole.state() and ledger.charges == number + 1
            if case != "clipped":  # each distribution of losses takes a second
                assert (
                    repr(again.guarantee()) == repr(ledger.guarantee()) == repr(whole.guarantee())
                )
                assert again.breakdown() == whole.breakdown()
    reading = read_ledger(path)
    assert reading.charges == 5 and state(reading.account) == state(whole)
    assert case == "clipped" or repr(reading.guarantee) == repr(whole.guarantee())


@pytest.mark.parametrize("mechanism", [POOLED, BOXED])
def test_tickets_and_their_binding_are_read_back(path: Path, mechanism: Mechanism) -> None:
    """The binding is record 1, and a charge of budgets holds the payment of each shard."""
    charges = np.random.default_rng(1).exponential(0.25, (3, 40))
    whole = Accountant(DELTA, epsilon=12.0)
    for part in range(4):
        again = Accountant.from_state(whole.state())
        with Accountant(DELTA, epsilon=12.0, path=path) as ledger:
            assert ledger.charges == (0 if part == 0 else 1 + 10 * part)
            for at in range(10 * part, 10 * part + 10):
                offers = []
                for one in (whole, again, ledger):
                    here = charges[:, at : at + 1]
                    offers.append(offer(charges=here, mechanism=mechanism, ensemble="e"))
                    one.charge(offers[-1])
                assert (offers[0]._members == offers[1]._members).all()
                assert (offers[0]._members == offers[2]._members).all()
            assert state(again) == state(ledger) == state(whole)
    assert not offers[0]._members.all() and (whole.spent <= whole.limit).all()
    reading = read_ledger(path)
    records = list(reading.records())[1:]
    assert state(reading.account) == state(whole) and reading.charges == 41
    largest, (_, order) = mechanism.largest_charge(3), mechanism.measure or ()
    assert reading.account.budget is not None and reading.account.budget.largest == largest
    expected = Binding(repr(mechanism), 3, order, largest, "e", None)
    assert records[0].events() == [expected]
    paid = np.concatenate([one.events()[0].charge for one in records[1:]], axis=1)
    assert ((paid == charges) | (paid == 0)).all() and (paid != charges).any()


@pytest.mark.parametrize(
    ("name", "value"),
    [("delta", 1e-6), ("epsilon", 3.0), ("epsilon", None), ("adjacency", "replace_one")],
)
def test_changed_settings_are_refused(path: Path, name: str, value: Any) -> None:
    settings: dict[str, Any] = {"delta": DELTA, "epsilon": 2.0, "path": path}
    with Accountant(**settings) as ledger:
        ledger.add(PublicAnswer(1))
    with pytest.raises(LedgerMismatchError, match=f"{name} must be .* got {value!r}"):
        Accountant(**{**settings, name: value})
    with Accountant(**settings) as ledger:
        assert ledger.charges == 1


def test_bad_arguments_leave_no_files(path: Path) -> None:
    for name, value in (("delta", 0.0), ("epsilon", -1.0), ("adjacency", "add_remove")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            Accountant(**{"delta": DELTA, "path": path, name: value})
    for look in (lambda: Accountant(DELTA, path=path, create=False), lambda: read_ledger(path)):
        with pytest.raises(LedgerWriteError, match="ledger.db must be"):
            look()
    assert not list(path.parent.iterdir())


def test_opening_reads_three_records_however_many_there_are(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The totals stand for the other records."""
    charged(50, path=path).close()
    read: list[Any] = []
    record = ledgers._record
    with monkeypatch.context() as patched:
        patched.setattr(ledgers, "_record", lambda row: read.append(row[0]) or record(row))
        with Accountant(DELTA, path=path) as ledger:
            assert read == [0, 50, 49] and state(ledger) == state(charged(50))


def test_an_interruption_between_file_and_memory_ends_charging(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the next totals would lack the charge that is not in memory."""

    class Interrupted(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            found = super().execute(statement, *values)
            if statement == "COMMIT" and path.exists() and ledger.charges == 1:
                raise KeyboardInterrupt
            return found

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Interrupted))
        ledger = charged(0, path=path)
    with ledger:
        ledger.add(answer(0))
        with pytest.raises(KeyboardInterrupt):
            ledger.add(answer(1))
        assert ledger.charges == 1 and read_ledger(path).charges == 2
        for _ in range(2):
            with pytest.raises(LedgerClosedError, match="must be opened again: a charge failed"):
                ledger.add(answer(2))
    with pytest.raises(LedgerClosedError, match="must be opened again"):
        ledger.add(answer(2))
    with Accountant(DELTA, path=path) as again:
        assert state(again) == state(charged(2)) == state(read_ledger(path).account)


DURABLE = {"journal_mode": "wal", "synchronous": 2, "fullfsync": 1, "checkpoint_fullfsync": 1}


def test_a_record_is_flushed_before_the_release(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every commit waits for the device, and a new ledger is complete before it has its name."""
    asked: list[str] = []

    class Watched(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            execute, word = super().execute, statement.split("(")[0].removeprefix("PRAGMA ")
            if word == "COMMIT":
                asked.append(f"{word} {Path(execute('PRAGMA database_list').fetchone()[2]).name}")
                found = {key: execute(f"PRAGMA {key}").fetchone()[0] for key in DURABLE}
                assert found == DURABLE, f"{asked[-1]}: {found}"
            return execute(statement, *values)

    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Watched))
    monkeypatch.setattr(
        os, "replace", lambda old, new: asked.append(f"as {Path(new).name}") or replace(old, new)
    )
    monkeypatch.setattr(
        os, "fsync",
        lambda file: asked.append(
            f"fsync {os.path.samestat(os.fstat(file), path.parent.stat()) and 'folder'}"
        ) or fsync(file),
    )  # fmt: skip
    for expected in (["fsync False", "as ledger.db", "fsync folder"], []):  # made, opened again
        with Accountant(DELTA, path=path) as ledger:
            assert asked == expected
            for number in range(2):
                asked.clear()
                ledger.add(answer(number))
                assert asked == ["COMMIT ledger.db"]
        asked.clear()


def test_strange_names_and_links_lead_to_the_same_ledger(tmp_path: Path) -> None:
    path = tmp_path / "a ledger?mode=ro#%41'ä.db"
    charged(2, path=path).close()
    link, other = tmp_path / "link.db", tmp_path / "other.db"
    link.symlink_to(path)
    with Accountant(DELTA, path=link) as ledger:
        assert ledger.charges == 2
        with pytest.raises(LedgerBusyError):
            Accountant(DELTA, path=path)
        other.hardlink_to(path)
        with pytest.raises(LedgerWriteError, match="must be a file with one name alone"):
            Accountant(DELTA, path=other)


def test_a_second_writer_is_refused_until_the_first_is_gone(path: Path) -> None:
    """In this process, in a forked child and in another process that is killed."""
    with charged(1, path=path) as ledger:

        def work() -> None:
            with pytest.raises(ValueError, match="in the process that made it"):
                ledger.add(answer(1))
            ledger.close()  # its parent's lock stays
            with pytest.raises(LedgerBusyError):
                Accountant(DELTA, path=path)

        assert ended(work) == 0
        with pytest.raises(LedgerBusyError, match="is held by another writer"):
            Accountant(DELTA, path=path)
        ledger.add(answer(1))  # and the first one goes on
    forgotten = Accountant(DELTA, path=path)
    del forgotten  # without close
    gc.collect()
    told, telling = os.pipe()

    def hold() -> None:
        ledger = Accountant(DELTA, path=path)
        os.write(telling, b"%d" % ledger.charges)
        signal.pause()

    holder = forked(hold)
    assert os.read(told, 1) == b"2"
    with pytest.raises(LedgerBusyError, match="is held by another writer"):
        Accountant(DELTA, path=path)
    assert read_ledger(path).charges == 2
    os.kill(holder, signal.SIGKILL)
    assert status_of(holder) == -signal.SIGKILL
    with Accountant(DELTA, path=path) as again:
        assert state(again) == state(charged(2))


def test_a_living_child_does_not_keep_a_closed_ledger(path: Path) -> None:
    ledger = charged(1, path=path)
    child = forked(signal.pause)
    try:
        ledger.close()
        with Accountant(DELTA, path=path) as again:
            assert state(again) == state(charged(1))
    finally:
        os.kill(child, signal.SIGKILL)
        status_of(child)


def test_a_child_charges_its_own_ledger_while_a_thread_of_its_parent_writes(path: Path) -> None:
    writing, work = threading.Event(), lambda: charged(1, path=path)

    def write() -> None:
        with ledgers.WRITING:
            writing.set()
            time.sleep(0.2)

    thread = threading.Thread(target=write)
    thread.start()
    writing.wait()
    assert ended(work) == 0
    thread.join()


def test_threads_share_a_ledger(path: Path) -> None:
    """Every charge is one record, and no shard pays more than its budget; readers see each."""
    with Accountant(DELTA, epsilon=2.0, path=path) as ledger:
        ledger.charge(offer(charges=[[0.0]]))
        part, offers, seen = ledger.limit / 20.5, list[Any](), list[int]()

        def work() -> None:
            for _ in range(10):
                offers.append(offer(charges=[[part]]))
                ledger.charge(offers[-1])

        def look() -> None:
            while any(map(threading.Thread.is_alive, threads[:3])):
                seen.append(read_ledger(path).charges)

        threads = [threading.Thread(target=one) for one in (work, work, work, look)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reading = read_ledger(path)
        assert ledger.charges == reading.charges == 32 and seen and seen == sorted(seen)
        assert sum(bool(one._members.all()) for one in offers) == 20  # type: ignore[attr-defined]
        assert (ledger.spent <= ledger.limit).all() and state(reading.account) == state(ledger)


def test_a_writer_that_was_killed_can_be_read_without_being_repaired(path: Path) -> None:
    with charged(4, path=path):
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
        copied = copy(path, path.with_name("copy.db"))
    before = {suffix: Path(f"{copied}{suffix}").read_bytes() for suffix in ("", "-wal")}
    assert read_ledger(copied).charges == 4
    assert all(Path(f"{copied}{suffix}").read_bytes() == was for suffix, was in before.items())


@pytest.mark.parametrize("how", ["replace", "remove"])
def test_a_file_that_is_taken_away_while_open_is_seen(path: Path, how: str) -> None:
    with charged(1, path=path) as ledger:
        older = copy(path, path.with_name("older.db"))
        if how == "replace":
            older.replace(path)
        else:
            path.unlink()
        with pytest.raises(LedgerClosedError, match="while it was open"):
            ledger.add(answer(1))
