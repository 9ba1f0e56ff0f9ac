"""A ledger that is opened again has the same totals; charges are durable; there is one writer.

And the register of ledgers: what it keeps, what adds up, and what it survives.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from privacy_cases import (
    BOXED,
    DELTA,
    POOLED,
    TOTALS,
    answer,
    charged,
    copy,
    offer,
    random_losses,
    state,
)
from processes import ended, forked, status_of

from adapmixed.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerMismatchError,
    LedgerWriteError,
)
from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    ClippedAnswer,
    IndividualCharge,
    PublicAnswer,
    read_ledger,
)
from adapmixed.privacy import ledger as ledgers
from adapmixed.privacy.events import Binding, Caveat, Event, RenyiBound
from adapmixed.privacy.ledger import entered, register_of, together
from adapmixed.privacy.planner import recommended


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
            for accountant in (whole, again, ledger):
                accountant.add(several)
            assert again.state() == whole.state() and ledger.charges == number + 1
            if case != "clipped":  # each distribution of losses takes a second
                assert len({repr(a.guarantee()) for a in (again, ledger, whole)}) == 1
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
                for accountant in (whole, again, ledger):
                    here = charges[:, at : at + 1]
                    offers.append(offer(charges=here, mechanism=mechanism, ensemble="e"))
                    accountant.charge(offers[-1])
                assert (offers[0]._members == offers[1]._members).all()
                assert (offers[0]._members == offers[2]._members).all()
            assert state(again) == state(ledger) == state(whole)
    assert not offers[0]._members.all() and (whole.spent <= whole.limit).all()
    reading = read_ledger(path)
    records = list(reading.records())[1:]
    assert state(reading.account) == state(whole) and reading.charges == 41
    largest, order = mechanism.largest_charge(3), mechanism.charge_order
    assert reading.account.budget is not None and reading.account.budget.largest == largest
    expected = Binding(repr(mechanism), 3, order, largest, "e", None)
    assert records[0].events() == [expected]
    paid = np.concatenate([record.events()[0].charge for record in records[1:]], axis=1)
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
    for none in (path, path.parent):  # no file, a folder
        for look in (read_ledger, lambda none: Accountant(DELTA, path=none, create=False)):
            with pytest.raises(LedgerWriteError, match=f"{none} must be an existing file"):
                look(none)
    assert not list(path.parent.iterdir())


def test_opening_reads_three_records_however_many_there_are(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The totals stand for the other records."""
    charged(50, path=path).close(empty=False)
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
            cursor = super().execute(statement, *values)
            if statement == "COMMIT" and path.exists() and ledger.charges == 0:
                raise KeyboardInterrupt
            return cursor

    with monkeypatch.context() as patched:
        patched.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Interrupted))
        ledger = charged(0, path=path)
    with pytest.raises(KeyboardInterrupt):
        ledger.add(answer(0))
    assert ledger.charges == 0 and read_ledger(path).charges == 1
    for _ in range(2):
        with pytest.raises(LedgerClosedError, match="must be opened again: a charge failed"):
            ledger.add(answer(1))
        ledger.close(empty=False)  # it has a charge
    with Accountant(DELTA, path=path) as again:
        assert state(again) == state(charged(1)) == state(read_ledger(path).account)


PRAGMAS = {"journal_mode": "wal", "synchronous": 2, "fullfsync": 1, "checkpoint_fullfsync": 1}
PRAGMAS |= {"cell_size_check": 1}  # shows more damage


def test_a_record_is_flushed_before_the_release(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every commit waits for the device, and a new ledger is complete before it has its name."""
    steps: list[str] = []

    class Watched(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            execute, word = super().execute, statement.split("(")[0].removeprefix("PRAGMA ")
            if word == "COMMIT":
                steps.append(f"{word} {Path(execute('PRAGMA database_list').fetchone()[2]).name}")
                pragmas = {key: execute(f"PRAGMA {key}").fetchone()[0] for key in PRAGMAS}
                assert pragmas == PRAGMAS, f"{steps[-1]}: {pragmas}"
            return execute(statement, *values)

    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Watched))
    monkeypatch.setattr(
        os, "replace", lambda old, new: steps.append(f"as {Path(new).name}") or replace(old, new)
    )
    monkeypatch.setattr(
        os, "fsync",
        lambda file: steps.append(
            f"fsync {os.path.samestat(os.fstat(file), path.parent.stat()) and 'folder'}"
        ) or fsync(file),
    )  # fmt: skip
    for expected in (["fsync False", "as ledger.db", "fsync folder"], []):  # made, opened again
        with Accountant(DELTA, path=path) as ledger:
            assert steps == expected
            for number in range(2):
                steps.clear()
                ledger.add(answer(number))
                assert steps == ["COMMIT ledger.db"]
        steps.clear()


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
        with pytest.raises(LedgerWriteError, match="must be an existing file with one name"):
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
    hearing, telling = os.pipe()

    def hold() -> None:
        ledger = Accountant(DELTA, path=path)
        os.write(telling, b"%d" % ledger.charges)
        signal.pause()

    holder = forked(hold)
    assert os.read(hearing, 1) == b"2"
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
        with pytest.raises(LedgerClosedError, match="must be opened again: it was closed"):
            ledger.add(answer(1))
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

        threads = [threading.Thread(target=target) for target in (work, work, work, look)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reading = read_ledger(path)
        assert ledger.charges == reading.charges == 32 and seen and seen == sorted(seen)
        assert sum(bool(t._members.all()) for t in offers) == 20  # type: ignore[attr-defined]
        assert (ledger.spent <= ledger.limit).all() and state(reading.account) == state(ledger)


def test_a_writer_that_was_killed_can_be_read_without_being_repaired(path: Path) -> None:
    with charged(4, path=path):
        assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
        copied = copy(path, path.with_name("copy.db"))
    before = {suffix: Path(f"{copied}{suffix}").read_bytes() for suffix in ("", "-wal")}
    assert read_ledger(copied).charges == 4
    assert all(Path(f"{copied}{suffix}").read_bytes() == data for suffix, data in before.items())


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


POOL = BoundedRangeAnswer(2.0, -0.25, 1.0, 64, 1, 500)
OTHER = BoundedRangeAnswer(1.0, -0.5, 0.5, 64, 1, 900)
BOX = ClippedAnswer(0.5, 2.0, 64, 1, 100)
SHARE = IndividualCharge(None, np.full((64, 1), 1e-6))
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
        (SHARE, {"epsilon": 2.1}, f"at δ = 2e-05 {ADDED}"),
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
    total = together(tmp_path / "e")
    assert total.words.startswith("All 2 ledgers of this ensemble's periods together, so far: ")
    assert words in total.words
    assert ("This is fixed only if the number of" in total.words) == ("no ε" not in words)
    plain, epsilon = sum(r.guarantee.epsilon or 0 for r in total.readings), total.stated.epsilon
    assert epsilon is None or first.stated.epsilon < epsilon <= np.nextafter(plain, 9)
    assert event is not SHARE or epsilon == np.nextafter(plain, 9)  # the sum was rounded down
    if words == COMPOSED and isinstance(event, BoundedRangeAnswer):
        plans = [replace(e, queries=e.budget or 0, budget=None) for e in (POOL, event)]
        assert epsilon == Accountant(1e-5).add(plans).get_epsilon(1e-5) < plain


def test_lost_and_moved_ledgers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = charge(tmp_path / "a.db", POOL)
    assert "ledgers" not in caplog.text
    second = charge(tmp_path / "b.db", POOL)
    assert f"{second} is one of 2 ledgers of this ensemble's periods" in caplog.text
    caplog.clear()
    charge(first, POOL)  # it is known
    Accountant(1e-5).register(tmp_path / "f")  # in memory: nothing to enter
    assert caplog.text == "" and not register_of(tmp_path / "f").exists()
    moved = first.rename(tmp_path / "c.db")
    lost = f"Not there, counted in full, caveats unknown: {first} (lost or moved)."
    total = together(tmp_path / "e")
    assert lost in total.words and total.stated.delta == 2e-5
    assert total.stated.epsilon == 2 * (total.readings[0].guarantee.epsilon or 0.0)
    charge(tmp_path / "a.db", OTHER)  # another ledger in its place
    assert lost in together(tmp_path / "e").words
    charge(moved, POOL)
    total = together(tmp_path / "e")
    assert total.words.startswith("All 3 ledgers") and "Not there" not in total.words
    assert {Path(r.path) for r in total.readings} == {first, second, moved}
    charge(tmp_path / "d.db", PublicAnswer(1))  # its promise comes with the first private answer
    charge(tmp_path / "d.db", POOL).write_bytes(b"?")
    assert f"unknown: {tmp_path / 'd.db'} (damaged)." in together(tmp_path / "e").words
    way = {"adjacency": "replace_one"}
    charge(tmp_path / "g.db", POOL, **way).unlink()
    twice = Accountant(1e-5, **way).add([POOL]).get_epsilon(1e-5)  # type: ignore[arg-type]
    grown = (together(tmp_path / "e").stated.epsilon or 0.0) - (total.stated.epsilon or 0.0)
    assert grown >= twice > 3.0
    charge(tmp_path / "h.db", POOL, replace(POOL, budget=None)).unlink()  # no promise any more
    assert together(tmp_path / "e").stated.epsilon is None
    charge(tmp_path / "f.db", PublicAnswer(1)).unlink()
    assert together(tmp_path / "e").stated.epsilon is None


def test_the_register_follows_what_an_open_ledger_promises(tmp_path: Path) -> None:
    with Accountant(1e-5, path=tmp_path / "a.db") as accountant:
        accountant.register(tmp_path / "e")
        for event in (POOL, replace(POOL, budget=None)):
            accountant.add(event)
            (entry,) = entered(register_of(tmp_path / "e")).values()
            assert (entry.epsilon is None) == (event.budget is None)


def test_budgets_of_every_shard_add_up_and_too_many_ledgers_have_no_sum(tmp_path: Path) -> None:
    for name in "ab":
        charge(tmp_path / name, SHARE, epsilon=2.1)
    assert f"at δ = 2e-05 {ADDED}" in together(tmp_path / "e").words
    for number in range(10):
        charge(tmp_path / f"{number}.db", BOX, delta=0.1)
    assert "δ of all ledgers add up to 1 or more" in together(tmp_path / "e").words


def test_plans_of_one_order_compose_and_caveats_stay(tmp_path: Path) -> None:
    """PMixED's sum holds for exact mixtures, and has the caveats of all its ledgers."""
    ball, exact = RenyiBound(12.0, 1e-3, 64, 1, budget=100), "for tokens drawn from the exact mix"
    charge(tmp_path / "a.db", ball, Caveat("base"))
    charge(tmp_path / "b.db", replace(ball, epsilon=2e-3, budget=50))
    total = together(tmp_path / "e")
    joint = Accountant(1e-5).add([RenyiBound(12.0, 1e-3, 64, 100), RenyiBound(12.0, 2e-3, 64, 50)])
    assert total.stated.epsilon == joint.get_epsilon(1e-5)
    assert f"(all answers composed; {exact}" in total.words
    assert total.words.count("The public model was not compared") == 1
    charge(tmp_path / "c.db", replace(ball, order=13.0))
    assert f"at δ = 3e-05 (their ε and δ added; {exact}" in together(tmp_path / "e").words


@pytest.mark.parametrize("way", ["zero_out", "replace_one"])
@pytest.mark.parametrize(
    "name", [pytest.param("clipped-mixing", marks=pytest.mark.slow), "clipped-log-pool"]
)
def test_ledgers_state_what_the_plan_of_all_their_tokens_said(
    name: str, way: str, tmp_path: Path
) -> None:
    plan = recommended(2.0, 1e-5, 64, 200, way, mechanism=name)
    family = ClippedAnswer if name == "clipped-mixing" else BoundedRangeAnswer
    event: Any = family(**plan.settings, num_models=64, queries=1, budget=100)
    charge(tmp_path / "a.db", event, event, adjacency=way)
    charge(tmp_path / "b.db", event, adjacency=way)
    total = together(tmp_path / "e")
    period, stated = total.readings[0].guarantee.epsilon or 0.0, total.stated.epsilon or 0.0
    assert total.stated.delta == 1e-5 and stated < 2 * period
    assert 0.999 * plan.epsilon < stated <= plan.epsilon <= 2.0  # an accountant has a finer grid
    charge(tmp_path / "c.db", replace(event, upper=1.01), adjacency=way)  # not one pair for all
    assert together(tmp_path / "e").stated.delta == (3e-5 if name == "clipped-mixing" else 1e-5)


def test_processes_at_once_and_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register, last = register_of(tmp_path / "e"), tmp_path / "last.db"
    paths = [tmp_path / f"{number}.db" for number in range(6)]
    children = [forked(lambda path=path: charge(path, POOL)) for path in paths]  # type: ignore[misc]
    assert [status_of(child) for child in children] == [0] * 6
    assert len(together(tmp_path / "e").readings) == len(entered(register)) == 6
    modes = [path.stat().st_mode & 0o777 for path in (register.parent, *register.parent.iterdir())]
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
        words = "format_version must be 2, got 1: use the adapmixed that" if "1" in text else ""
        with pytest.raises(ValueError, match=f"must be a register of ledgers: {words}"):
            together(tmp_path / "e")
