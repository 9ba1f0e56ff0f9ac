"""A ledger that is opened again has the same totals; charges are durable; there is one writer."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accountant_cases import Kind, Offer
from ledger_cases import DELTA, answer, copy, ends, every_event, file_of, make, plain, state

from adapmixed.errors import (
    BudgetSpentError,
    LedgerBusyError,
    LedgerClosedError,
    LedgerMismatchError,
    LedgerWriteError,
)
from adapmixed.privacy import Accountant, PublicAnswer, RenyiBound, read_ledger
from adapmixed.privacy.account import Binding
from adapmixed.privacy.ledger import Record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_reopening_gives_the_same_totals_in_every_bit(path: Path) -> None:
    without = Accountant(DELTA)
    with Accountant(DELTA, path=path) as ledger:
        assert (ledger.charges, ledger.guarantee().kind) == (0, "public")
        for number in range(7):
            without.add(answer(number))
            ledger.add(answer(number))
            assert state(ledger) == state(without)
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == 7
        assert state(ledger) == state(without)
        without.add(answer(99))
        ledger.add(answer(99))
    reading = read_ledger(path)
    assert reading.charges == 8
    assert state(reading.account) == state(without)
    assert reading.guarantee == without.guarantee()


def kinds() -> list[list[Any]]:
    """Return lists of events that share a total; together they have every class."""
    groups: dict[Any, list[Any]] = {}
    for event in every_event():
        key = type(event), getattr(event, "num_models", None), getattr(event, "adjacency", None)
        groups.setdefault(key, []).append(event)
    return list(groups.values())


@pytest.mark.parametrize("events", kinds(), ids=lambda group: type(group[0]).__name__)
def test_every_event_is_replayed(path: Path, events: list[Any]) -> None:
    measure = getattr(events[0], "measure", None)
    order = getattr(events[0], "order", None)
    options = {} if measure is None else {"epsilon": 1e300 if order else 8.0}
    without = Accountant(DELTA, **options)
    with Accountant(DELTA, path=path, **options) as ledger:
        for event in [*events, [PublicAnswer(3), PublicAnswer(4)]]:
            try:
                without.add(event)
            except ValueError:
                with pytest.raises(ValueError):
                    ledger.add(event)
                continue
            ledger.add(event)
        assert state(ledger) == state(without)
    with Accountant(DELTA, path=path, **options) as ledger:
        assert state(ledger) == state(without)
        assert repr(ledger.guarantee()) == repr(without.guarantee())
    assert state(read_ledger(path).account) == state(without)


@pytest.mark.parametrize("largest", [None, 0.07])
def test_proposals_and_their_binding_are_replayed(path: Path, largest: float | None) -> None:
    """The binding is record 1, and a charge of budgets holds the payment of each shard."""
    pool = Kind("a pool", ("zcdp", None), largest=largest)
    charges = np.random.default_rng(1).exponential(0.01, (3, 40))
    without = Accountant(DELTA, epsilon=2.0)
    for part in range(4):
        with Accountant(DELTA, epsilon=2.0, path=path) as ledger:
            assert ledger.charges == (0 if part == 0 else 1 + 10 * part)
            for position in range(10 * part, 10 * part + 10):
                offers = [
                    Offer(charges=charges[:, position : position + 1], mechanism=pool, ensemble="e")
                    for _ in range(2)
                ]
                ledger.charge(offers[0])
                without.charge(offers[1])
                assert (offers[0].active == offers[1].active).all()
            assert state(ledger) == state(without)
    assert not offers[0].active.all() and (without.spent <= without.limit).all()
    records: list[Record] = []
    reading = read_ledger(path, seen=records.append)
    assert state(reading.account) == state(without) and reading.charges == 41
    assert reading.account.budget is not None and reading.account.budget.largest == largest
    expected = Binding(repr(pool), 3, "zcdp", None, largest, "e", None)
    assert records[0].entry() == {"binding": expected}
    paid = np.concatenate([one.entry()["events"][0].charge for one in records[1:]], axis=1)
    assert ((paid == charges) | (paid == 0)).all() and (paid != charges).any()


def test_a_fixed_budget_is_spent_across_openings(path: Path) -> None:
    bound = RenyiBound(3.0, 0.1, 4, 2, budget=3)
    with Accountant(DELTA, path=path) as ledger:
        ledger.add(bound)
        first = ledger.guarantee()
    with Accountant(DELTA, path=path) as ledger:
        with pytest.raises(BudgetSpentError, match="queries must stay within the 3"):
            ledger.add(bound)
        ledger.add(RenyiBound(3.0, 0.1, 4, 1, budget=3))  # still usable
        assert (ledger.charges, ledger.guarantee().epsilon) == (2, first.epsilon)


def test_what_cannot_be_charged_is_refused_before_anything_is_written(path: Path) -> None:
    with make(path, 1) as ledger:
        for bad, words in [
            ("loss", "events must be privacy events, got str"),
            (3, "events must be privacy events, got int"),
            ([*answer(0), None], "events must be privacy events, got NoneType"),
            (answer(0, models=6), "num_models must be the same in every event"),
        ]:
            with pytest.raises(ValueError, match=words):
                ledger.add(bad)  # type: ignore[arg-type]
        ledger.add(answer(1))
        assert read_ledger(path).charges == ledger.charges == 2
        assert state(ledger) == state(plain(2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": 1e-6}, "delta must be what the ledger was created with, 1e-05, got 1e-06"),
        ({"epsilon": 3.0}, "epsilon must be what the ledger was created with, 2.0, got 3.0"),
        ({"epsilon": None}, "epsilon must be what the ledger was created with, 2.0, got None"),
        ({"adjacency": "replace_one"}, "adjacency must be .* 'zero_out', got 'replace_one'"),
    ],
)
def test_changed_settings_are_refused(path: Path, changes: Any, words: str) -> None:
    settings = {"delta": DELTA, "epsilon": 2.0, "path": path}
    with Accountant(**settings) as ledger:
        ledger.add(PublicAnswer(1))
    with pytest.raises(LedgerMismatchError, match=words):
        Accountant(**{**settings, **changes})
    with Accountant(**settings) as ledger:
        assert ledger.charges == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": 0.0}, "delta must be"),
        ({"epsilon": -1.0}, "epsilon must be"),
        ({"adjacency": "add_remove"}, "adjacency must be one of"),
    ],
)
def test_bad_arguments_leave_no_files(path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accountant(**{"delta": DELTA, "path": path, **changes})
    with pytest.raises(LedgerWriteError, match="must be a ledger, but there is no such file"):
        Accountant(DELTA, path=path, create=False)
    with pytest.raises(LedgerWriteError, match="must be a ledger, but there is no such file"):
        read_ledger(path)
    assert not list(path.parent.iterdir())


def test_closed_means_closed(path: Path) -> None:
    ledger = make(path, 1)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerClosedError, match="must be opened again: it was closed"):
        ledger.add(answer(1))
    assert (ledger.charges, ledger.queries) == (1, 1)


def test_opening_reads_three_records_however_many_there_are(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The totals stand for the other records and equal a full replay."""
    from adapmixed.privacy import ledger as ledgers

    make(path, 50).close()
    asked: list[str] = []
    connect, read = ledgers._connect, []

    def watched(*of: Any) -> sqlite3.Connection:
        connection = connect(*of)
        connection.set_trace_callback(asked.append)
        return connection

    record = ledgers._record
    with monkeypatch.context() as patched:
        patched.setattr(ledgers, "_connect", watched)
        patched.setattr(ledgers, "_record", lambda row: read.append(row) or record(row))
        with Accountant(DELTA, path=path) as ledger:
            assert len(read) == 3 and state(ledger) == state(plain(50))
    selects = [statement for statement in asked if "FROM record" in statement]
    assert [one.split()[-1] for one in selects] == ["1", "2"]
    assert state(read_ledger(path).account) == state(plain(50))


def test_an_interruption_between_file_and_memory_ends_charging(path: Path) -> None:
    """Otherwise the next totals would lack the charge that is not in memory."""
    with make(path, 1) as ledger:
        before = ledger._account
        ledger.add(answer(1))
        ledger._account = before  # as if a signal had come before the assignment
        for _ in range(2):
            with pytest.raises(LedgerClosedError, match="opened again: a charge was interrupted"):
                ledger.add(answer(2))
        assert file_of(ledger).reading.charges == 2
    with Accountant(DELTA, path=path) as again:
        assert state(again) == state(plain(2)) == state(read_ledger(path).account)


DURABLE = {"journal_mode": "wal", "synchronous": 2, "fullfsync": 1, "checkpoint_fullfsync": 1}


@pytest.fixture
def log(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record system calls from here on, in order, as the call and the file's name."""
    asked: list[str] = []

    def name(file: int) -> str:
        one = os.fstat(file)
        for place in (path.parent, *path.parent.iterdir()):
            if os.path.samestat(one, place.stat()):
                return "folder" if place == path.parent else place.name
        return "another"

    class Watched(sqlite3.Connection):
        """A connection that records commits and checkpoints, and that they wait for the device."""

        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            execute = super().execute
            word = statement.split("(")[0].removeprefix("PRAGMA ")
            if word in ("COMMIT", "wal_checkpoint"):
                asked.append(f"{word} {Path(execute('PRAGMA database_list').fetchone()[2]).name}")
                found = {key: execute(f"PRAGMA {key}").fetchone()[0] for key in DURABLE}
                assert found == DURABLE, f"{asked[-1]}: {found}"
            return execute(statement, *values)

    def watch(call: str, named: Callable[..., str]) -> None:
        function = getattr(os, call)

        @functools.wraps(function)
        def watched(*values: Any) -> Any:
            asked.append(f"{call} {named(*values)}")
            return function(*values)

        monkeypatch.setattr(os, call, watched)

    watch("fsync", name)
    watch("rename", lambda _, new: Path(new).name)
    connect = functools.partial(sqlite3.connect, factory=Watched)
    monkeypatch.setattr(sqlite3, "connect", connect)
    return asked


CREATED = [
    "COMMIT ledger.db-new", "wal_checkpoint ledger.db-new", "rename ledger.db", "fsync folder",
]  # fmt: skip


def test_a_record_is_flushed_before_the_release(path: Path, log: list[str]) -> None:
    for expected in (CREATED, []):  # made, opened again
        with Accountant(DELTA, path=path) as ledger:
            assert log == expected
            for number in range(2):
                log.clear()
                ledger.add(answer(number))
                assert [*log, "released"] == ["COMMIT ledger.db", "released"]
        log.clear()


HOLD = "import sys\nfrom adapmixed.privacy import Accountant\n"
HOLD += "ledger = Accountant(1e-5, path=sys.argv[1])\n"
HOLD += "print('open', flush=True)\nsys.stdin.read()\n"


def test_files_are_for_the_owner_alone(path: Path) -> None:
    with make(path, 1):
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}


def test_strange_names_and_links_lead_to_the_same_ledger(tmp_path: Path) -> None:
    path = tmp_path / "a ledger?mode=ro#%41'ä.db"
    make(path, 2).close()
    link = tmp_path / "link.db"
    link.symlink_to(path)
    with Accountant(DELTA, path=link) as ledger:
        assert ledger.charges == 2
        with pytest.raises(LedgerBusyError):
            Accountant(DELTA, path=path)
        (other := tmp_path / "other.db").hardlink_to(path)
        with pytest.raises(LedgerWriteError, match="must have one name"):
            Accountant(DELTA, path=other)
    other.unlink()
    with Accountant(DELTA, path=link) as ledger:
        assert ledger.charges == 2


def test_a_second_writer_in_this_process_is_refused(path: Path) -> None:
    with make(path, 1) as ledger:
        with pytest.raises(LedgerBusyError, match="is held by another writer"):
            Accountant(DELTA, path=path)
        ledger.add(answer(1))  # and the first one goes on
    with Accountant(DELTA, path=path) as ledger:
        assert ledger.charges == 2
    ledger = Accountant(DELTA, path=path)
    del ledger  # forgotten without close
    gc.collect()
    Accountant(DELTA, path=path).close()


def test_a_second_writer_in_another_process_is_refused_until_the_first_is_killed(
    path: Path,
) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stdout.readline() == "open\n"
        with pytest.raises(LedgerBusyError, match="is held by another writer"):
            Accountant(DELTA, path=path)
        assert read_ledger(path).charges == 0
        holder.kill()
        holder.wait()
        with Accountant(DELTA, path=path) as ledger:
            ledger.add(answer(0))


def test_a_forked_child_cannot_charge(path: Path) -> None:
    with make(path, 1) as ledger:

        def work() -> None:
            with pytest.raises(ValueError, match="in the process that made it"):
                ledger.add(answer(1))
            ledger.close()
            with pytest.raises(LedgerBusyError):
                Accountant(DELTA, path=path)

        assert ends(work) == 0
        ledger.add(answer(1))
    with Accountant(DELTA, path=path) as again:
        assert state(again) == state(plain(2))


def test_a_living_child_does_not_keep_a_closed_ledger(path: Path) -> None:
    ledger = make(path, 1)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        ledger.close()
        with Accountant(DELTA, path=path) as again:
            assert state(again) == state(plain(1))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_threads_share_a_ledger(path: Path) -> None:
    """Every charge is one record, and no shard pays more than its budget."""
    with Accountant(DELTA, epsilon=2.0, path=path) as ledger:
        ledger.charge(Offer(charges=[[0.0]]))
        part, offers = ledger.limit / 20.5, []

        def work() -> None:
            for _ in range(10):
                offers.append(Offer(charges=[[part]]))
                ledger.charge(offers[-1])

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reading = read_ledger(path)
        assert ledger.charges == reading.charges == 32
        assert sum(bool(one.active.all()) for one in offers) == 20
        assert (ledger.spent <= ledger.limit).all()
        assert state(reading.account) == state(ledger)


def test_reading_while_a_writer_is_at_work(path: Path) -> None:
    with make(path, 0) as ledger:
        done = threading.Event()
        seen: list[int] = []
        errors: list[BaseException] = []

        def look() -> None:
            while not done.is_set():
                try:
                    seen.append(read_ledger(path).charges)
                except BaseException as error:
                    errors.append(error)
                    return

        reader = threading.Thread(target=look)
        reader.start()
        for number in range(60):
            ledger.add(answer(number))
        done.set()
        reader.join()
        assert not errors and seen == sorted(seen) and seen[-1] <= 60
        assert read_ledger(path).charges == 60


def test_a_writer_that_was_killed_can_be_read_without_being_repaired(path: Path) -> None:
    with make(path, 4):
        copied = copy(path, path.with_name("copy.db"))
    before = {suffix: Path(f"{copied}{suffix}").read_bytes() for suffix in ("", "-wal")}
    assert read_ledger(copied).charges == 4
    for suffix, content in before.items():
        assert Path(f"{copied}{suffix}").read_bytes() == content


@pytest.mark.parametrize("how", ["replace", "remove"])
def test_a_file_that_is_taken_away_while_open_is_seen(path: Path, how: str) -> None:
    with make(path, 1) as ledger:
        older = copy(path, path.with_name("older.db"))
        if how == "replace":
            older.replace(path)
        else:
            path.unlink()
        with pytest.raises(LedgerClosedError, match="while it was open"):
            ledger.add(answer(1))
