"""Noisy counts beside a ledger: each is on the device before it is known, and at most K are."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_cases import DELTA, copy, exit_status, forked, state
from test_ledger_crashes import CHARGE

from adapmixed.privacy import (
    Accountant,
    FilterBudget,
    IndividualCharge,
    Ledger,
    PerModelFilter,
    ReleasedCount,
)
from adapmixed.privacy.filter_total import FilterTotal
from adapmixed.privacy.ledger import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerMismatchError,
    records,
)
from adapmixed.privacy.ledger.store import Store

MODELS, K, SIGMA = 3, 3, 20.0
BUDGET = FilterBudget("zcdp", 1.0, DELTA, releases=K, sigma=SIGMA)
SETTINGS: dict[str, Any] = dict(delta=DELTA, configuration="a pool", filter_budget=BUDGET)
SECURE = SimpleNamespace(seeded=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def begin(ledger: Ledger, budget: FilterBudget = BUDGET) -> PerModelFilter:
    """A filter that goes on from what the ledger holds."""
    made = PerModelFilter(MODELS, budget, spent=ledger.accountant.individual_spent)
    ledger.attach(made)
    return made


def answer(ledger: Ledger, model_filter: PerModelFilter, amount: float = 0.125) -> None:
    charges = np.full((MODELS, 1), amount)
    charged = np.where(model_filter.admit(charges), charges, 0.0)
    ledger.charge(IndividualCharge("zcdp", None, charged))


def count(model_filter: PerModelFilter, threshold: float = 0.1, noise: float = 0.25) -> float:
    return model_filter.noisy_count(threshold, lambda *_, **__: noise, rng=SECURE)


@pytest.mark.parametrize("together", range(1, K + 1))
def test_no_more_counts_than_are_reserved_over_all_openings(path: Path, together: int) -> None:
    known: list[ReleasedCount] = []
    while len(known) < K:
        with Ledger.open(path, **SETTINGS) as ledger:
            assert ledger.accountant.released_counts == tuple(known)
            model_filter = begin(ledger)
            answer(ledger, model_filter)
            for _ in range(min(together, K - len(known))):
                before = ledger.charges
                shown = count(model_filter, noise=7.0 + len(known))
                known.append(ReleasedCount(MODELS, 0.1, SIGMA, MODELS + 7 + len(known)))
                assert shown == known[-1].noisy_count and ledger.charges == before + 1
                assert Ledger.verify(path).accountant.released_counts == tuple(known)
    for _ in range(2):
        with Ledger.open(path, **SETTINGS) as ledger:
            model_filter = begin(ledger)
            for threshold in (0.1, 0.2):  # neither again nor another
                with pytest.raises(ValueError, match="got none left of 3"):
                    count(model_filter, threshold)
            with pytest.raises(ValueError, match="within the 3 that the budget reserves"):
                ledger.charge(known[0])
            answer(ledger, model_filter)  # still usable
    reading = Ledger.verify(path)
    assert reading.accountant.released_counts == tuple(known)
    assert reading.totals.epsilon == BUDGET.epsilon()


def test_what_is_shown_was_recorded_before(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger.open(path, **SETTINGS) as ledger:
        model_filter, append = begin(ledger), Store.append

        def full(*_: object) -> None:
            raise OSError("full")

        monkeypatch.setattr(Store, "append", full)
        with pytest.raises(OSError, match="full"):
            count(model_filter)
        monkeypatch.setattr(Store, "append", append)
        for _ in range(2):  # what became of the record only opening can tell
            with pytest.raises(LedgerClosedError, match="a charge failed"):
                count(model_filter)
        with pytest.raises(ValueError, match="got none left of 3"):  # each counts as released
            count(model_filter)
    assert Ledger.verify(path).charges == 0
    with Ledger.open(path, **SETTINGS) as ledger:
        with pytest.raises(ValueError, match="no counts but the 0 that the ledger holds, got 3"):
            ledger.attach(model_filter)
        assert [count(begin(ledger)) for _ in range(K)] == [0.0] * K


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"releases": K + 1}, "3 noisy counts of standard deviation 20.0, got 4 noisy counts of"),
        ({"releases": 1}, "3 noisy counts of standard deviation 20.0, got 1 noisy counts of"),
        ({"sigma": 19.0}, "3 noisy counts of standard deviation 20.0, got 3 .* deviation 19.0"),
        ({"releases": 0, "sigma": None}, "got no noisy counts: counts are paid for before the"),
        ({"amount": 0.9}, "filter_budget must be what the ledger was created with, FilterBudget"),
    ],
)
def test_another_reservation_is_another_configuration(
    path: Path, changes: dict[str, Any], words: str
) -> None:
    with Ledger.open(path, **SETTINGS) as ledger:
        count(begin(ledger))
    before = path.read_bytes()
    with pytest.raises(LedgerMismatchError, match=words):
        Ledger.open(path, **{**SETTINGS, "filter_budget": replace(BUDGET, **changes)})
    assert path.read_bytes() == before
    with Ledger.open(path, **SETTINGS) as ledger:
        assert len(ledger.accountant.released_counts) == 1


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_ledger_begun_without_counts_releases_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    plain, fresh = replace(BUDGET, releases=0, sigma=None), records.Description.fresh
    settings = {**SETTINGS, "filter_budget": plain}

    def older(*arguments: Any) -> records.Description:
        return replace(fresh(*arguments), format_version=version)

    with monkeypatch.context() as patched:
        patched.setattr(records.Description, "fresh", staticmethod(older))
        with Ledger.open(path, **settings) as ledger:
            answer(ledger, begin(ledger, plain))
    assert ("releases" in Ledger.verify(path).description.text) == (version == 3)
    with pytest.raises(LedgerMismatchError, match="when the ledger was created, no noisy counts,"):
        Ledger.open(path, **SETTINGS)
    with Ledger.open(path, **settings) as ledger:  # and goes on
        model_filter = begin(ledger, plain)
        with pytest.raises(ValueError, match="reserved by the filter's budget, got none left of 0"):
            count(model_filter)
        with pytest.raises(ValueError, match="got a noisy count where none are"):
            ledger.charge(ReleasedCount(MODELS, 0.1, SIGMA, 1))
        answer(ledger, model_filter)
    assert Ledger.verify(path).charges == 2


def test_a_ledger_without_a_filter_releases_none(path: Path) -> None:
    with Ledger.open(path, delta=DELTA, configuration="a pool") as ledger:
        with pytest.raises(ValueError, match="filter_budget must be given to .* ReleasedCounts"):
            ledger.charge(ReleasedCount(MODELS, 0.1, SIGMA, 1))


def test_several_filters_share_the_counts_and_the_budget(path: Path) -> None:
    with Ledger.open(path, **SETTINGS) as ledger:
        early, late = begin(ledger), begin(ledger)
        for one in (early, late, early):
            count(one)
        with pytest.raises(ValueError, match="within the 3 that the budget reserves"):
            count(late)  # it has one left by its own reckoning
        with pytest.raises(ValueError, match="got none left"):
            count(begin(ledger))
        # Neither knows of the other's answers: what the counts take is no part of either's.
        most = BUDGET.available * (1 - 1e-9)
        answer(ledger, early, most)
        with pytest.raises(ValueError, match="within the budget of 1.0"):
            answer(ledger, late, BUDGET.reserved / 2)
        spent = ledger.accountant.individual_spent
        assert spent is not None and (spent >= most + BUDGET.reserved).all()
    with Ledger.open(path, **SETTINGS) as ledger:
        assert not begin(ledger).admit(np.full((MODELS, 1), BUDGET.reserved / 2)).any()


def test_counts_that_no_record_holds_are_refused(path: Path) -> None:
    elsewhere = PerModelFilter(MODELS, BUDGET)
    count(elsewhere)
    with Ledger.open(path, **SETTINGS) as ledger:
        with pytest.raises(ValueError, match="no counts but the 0 that the ledger holds, got 1"):
            ledger.attach(elsewhere)
        model_filter = begin(ledger)
        count(model_filter)
        ledger.attach(model_filter)  # once more, as every call of generate does
        Accountant(DELTA, filter_budget=BUDGET).attach(model_filter)
        count(model_filter)
        assert len(ledger.accountant.released_counts) == 2
        older = PerModelFilter.from_state(PerModelFilter(MODELS, BUDGET).state())
        ledger.attach(older)
        assert count(older) == 0.0
        with pytest.raises(ValueError, match="got none left"):
            count(older)
    with pytest.raises(LedgerClosedError, match="it was closed"):
        model_filter.noisy_count(0.1, lambda *_, **__: 0.5, rng=SECURE)
    going_on = PerModelFilter(MODELS, BUDGET, spent=np.full(MODELS, BUDGET.reserved))
    Accountant(DELTA, filter_budget=BUDGET).attach(going_on)
    with pytest.raises(ValueError, match="must be attached to its ledger"):
        count(going_on)


def test_counts_alone_cost_the_budget(path: Path) -> None:
    with Ledger.open(path, **SETTINGS) as ledger:
        assert ledger.totals.kind == "public"
        with pytest.raises(ValueError, match="model_filter must be attached"):
            ledger.charge(ReleasedCount(MODELS, 0.1, SIGMA, 1))
        model_filter = begin(ledger)
        with pytest.raises(ValueError, match="sigma must be that of the budget, 20.0"):
            ledger.charge(ReleasedCount(MODELS, 0.1, 21.0, 1))
        count(model_filter)
        with pytest.raises(ValueError, match="num_models must be the same in every event"):
            ledger.charge(ReleasedCount(MODELS + 1, 0.1, SIGMA, 1))
        assert (ledger.totals.kind, ledger.totals.queries) == ("fixed", 0)
        assert ledger.totals.epsilon == BUDGET.epsilon()
        again = Accountant.from_state(ledger.accountant.state())
        assert state(again) == state(ledger.accountant)
        assert again.released_counts == Ledger.verify(path).accountant.released_counts


def test_threads_share_the_counts(path: Path) -> None:
    shown, refused = [], []

    def ask(model_filter: PerModelFilter) -> None:
        for _ in range(2):
            try:
                shown.append(count(model_filter))
            except ValueError as error:
                refused.append(error)

    with Ledger.open(path, **SETTINGS) as ledger:
        filters = [begin(ledger), begin(ledger)] * 2
        threads = [threading.Thread(target=ask, args=(one,)) for one in filters]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (len(shown), len(refused)) == (K, 8 - K)
    assert len(Ledger.verify(path).accountant.released_counts) == K


def test_another_process_releases_none(path: Path) -> None:
    with Ledger.open(path, **SETTINGS) as ledger:
        model_filter = begin(ledger)

        def child() -> None:
            with pytest.raises(ValueError, match="in the process that made it"):
                count(model_filter)

        assert exit_status(forked(child)) == 0
        with pytest.raises(LedgerBusyError):  # a second rank or command, at the same time
            Ledger.open(path, **SETTINGS)
        assert count(model_filter) == 0.0


# Files that were altered


def three_counts(path: Path) -> Path:
    with Ledger.open(path, **SETTINGS) as ledger:
        model_filter = begin(ledger)
        for _ in range(K):
            answer(ledger, model_filter)
            count(model_filter)
    return path


def forged(path: Path, events: Sequence[Any]) -> Path:
    """A whole chain with these events besides, as who means to deceive makes it."""
    check = FilterTotal._check_count
    FilterTotal._check_count = lambda *_: None  # type: ignore[method-assign]
    try:
        with Ledger.open(path, **SETTINGS) as ledger:
            begin(ledger)
            ledger.charge(events)
    finally:
        FilterTotal._check_count = check  # type: ignore[method-assign]
    return path


def test_records_of_counts_that_were_altered_are_refused(path: Path, tmp_path: Path) -> None:
    three_counts(path)
    changes = {
        "DELETE FROM record WHERE sequence = 6": "must hold 6 charges, as its head says, found 5",
        "DELETE FROM record WHERE sequence = 2": "record 2 is missing, found 3",
        "UPDATE record SET events = replace(events, '\"noisy_count\":3', '\"noisy_count\":0')":
            "record 2 was altered",
        "UPDATE record SET events = replace(events, 'ReleasedCount', 'PublicAnswer')":
            "record 2 was altered",
        "UPDATE description SET text = replace(text, '\"releases\":3', '\"releases\":9')":
            "record 1 was altered|belong to another configuration|belongs to another",
        "UPDATE description SET text = replace(text, '\"sigma\":20.0', '\"sigma\":99.0')":
            "record 1 was altered|belongs to another",
    }  # fmt: skip
    for number, (statement, words) in enumerate(changes.items()):
        other = copy(path, tmp_path / f"{number}.db")
        with closing(sqlite3.connect(other, isolation_level=None)) as database:
            table = "description" if "description" in statement else "record"
            act = statement.split()[0].lower()
            name = f"no_{act}_of_{table}"
            query = "SELECT sql FROM sqlite_master WHERE name = ?"
            (trigger,) = database.execute(query, (name,)).fetchone()
            database.execute(f"DROP TRIGGER {name}")
            database.execute(statement)
            database.execute(trigger)
        with pytest.raises(LedgerCorruptError, match=words):
            Ledger.open(other, **SETTINGS)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (ReleasedCount(MODELS, 0.1, SIGMA, 3), "within the 3 that the budget reserves"),
        (ReleasedCount(MODELS, 0.1, 1.0, 3), "sigma must be that of the budget, 20.0"),
    ],
)
def test_a_forged_chain_holds_no_more_counts_either(
    path: Path, event: ReleasedCount, words: str
) -> None:
    forged(three_counts(path), [event])
    for reader in (lambda: Ledger.open(path, **SETTINGS), lambda: Ledger.verify(path)):
        with pytest.raises(LedgerCorruptError, match=f"record 7 cannot be charged: .*{words}"):
            reader()


# Processes that end


@pytest.mark.parametrize("name", list(CHARGE))
def test_a_process_that_ends_amid_a_count(path: Path, name: str) -> None:
    step, counted, _ = CHARGE[name]
    shown = path.with_name("shown")

    def work() -> None:
        ledger = Ledger.open(path, **SETTINGS)
        model_filter = begin(ledger)
        answer(ledger, model_filter)
        count(model_filter)
        step(ledger)
        shown.write_text(str(count(model_filter)))

    assert exit_status(forked(work)) == -signal.SIGKILL
    assert not shown.exists()
    left = K - 1 - counted
    with Ledger.open(path, **SETTINGS) as ledger:
        assert len(ledger.accountant.released_counts) == K - left
        model_filter = begin(ledger)
        for _ in range(left):
            count(model_filter)
        with pytest.raises(ValueError, match="got none left"):
            count(model_filter)
    assert len(Ledger.verify(path).accountant.released_counts) == K


def serve(path: Path, shown: Path, telling: int) -> None:
    """Releases what is left, each with its own noise, and shows it."""
    with Ledger.open(path, **SETTINGS) as ledger:
        model_filter = begin(ledger)
        os.write(telling, b"o")
        file = os.open(shown, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            while True:
                noise = float(random.SystemRandom().randrange(1, 2**50))
                os.write(file, b"%d\n" % count(model_filter, noise=noise))
                os.write(telling, b"r")
        except ValueError:
            os.write(telling, b"e")


def lines(shown: Path) -> list[int]:
    return [int(line) for line in shown.read_bytes().split()] if shown.exists() else []


def test_kills_at_random_moments_never_show_a_count_too_many(tmp_path: Path) -> None:
    generator, between, whole, pace = random.Random(os.urandom(4)), 0, 0, 0.01
    path, number = tmp_path / "0.db", 0
    for _ in range(80):
        shown = path.with_suffix(".shown")
        told, telling = os.pipe()
        work: Callable[[], None] = lambda path=path, shown=shown, to=telling: serve(  # noqa: E731
            path, shown, to
        )
        child = forked(work)
        os.close(telling)
        for _ in range(generator.randrange(3)):  # the opening, and one count
            before = time.monotonic()
            if os.read(told, 1) == b"r":
                pace = time.monotonic() - before
        time.sleep(generator.uniform(0.0, pace))
        os.kill(child, signal.SIGKILL)
        assert exit_status(child) in (-signal.SIGKILL, 0)
        os.close(told)
        seen = lines(shown)
        recorded = []
        if path.exists():
            counts = Ledger.verify(path).accountant.released_counts
            recorded = [one.noisy_count for one in counts]
        # In their order; what was recorded and not shown counts as released.
        rest = iter(recorded)
        assert len(recorded) <= K and all(one in rest for one in seen), (recorded, seen)
        between += len(recorded) - len(seen)
        if len(recorded) == K:
            with Ledger.open(path, **SETTINGS) as ledger:
                model_filter = begin(ledger)
                with pytest.raises(ValueError, match="got none left"):
                    count(model_filter)
            whole, number = whole + 1, number + 1
            path = tmp_path / f"{number}.db"
    assert whole >= 5 and between >= 1, (whole, between)
