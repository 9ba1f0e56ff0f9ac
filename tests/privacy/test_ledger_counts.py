"""Noisy counts beside a ledger: each is on the device before it is known, and at most K are."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from count_cases import BUDGET, MODELS, SETTINGS, SIGMA, K, answer, begin, count
from ledger_cases import DELTA, exit_status, forked, state

from adapmixed.privacy import Accountant, Ledger, PerModelFilter, ReleasedCount
from adapmixed.privacy.ledger import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerMismatchError,
    records,
)
from adapmixed.privacy.ledger.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


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
                shown = count(model_filter, noise=7 + len(known))
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
        with pytest.raises(
            ValueError, match="no counts but the 0 of its own that the ledger holds, got 3"
        ):
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


def test_counts_of_another_filter_stand_for_none_of_its_own(path: Path) -> None:
    """The ledger holds as many as this filter has released: they are not the same ones."""
    elsewhere = PerModelFilter(MODELS, BUDGET)
    count(elsewhere)
    written = elsewhere.state()
    with Ledger.open(path, **SETTINGS) as ledger:
        count(begin(ledger))
        for one in (elsewhere, PerModelFilter.from_state(written)):
            with pytest.raises(ValueError, match="no counts but the 0 of its own that the ledger"):
                ledger.attach(one)
        late = begin(ledger)
        with pytest.raises(ValueError, match="restore needs a filter that is new, got one with a"):
            late.restore(written)
        new = PerModelFilter(MODELS, BUDGET)
        new.restore(written)
        with pytest.raises(ValueError, match="no counts but the 0 of its own that the ledger"):
            ledger.attach(new)
        assert [count(late), count(late)] == [0, 0]
        with pytest.raises(ValueError, match="got none left of 3"):
            count(late)


def test_counts_that_no_record_holds_are_refused(path: Path) -> None:
    elsewhere = PerModelFilter(MODELS, BUDGET)
    count(elsewhere)
    with Ledger.open(path, **SETTINGS) as ledger:
        with pytest.raises(
            ValueError, match="no counts but the 0 of its own that the ledger holds, got 1"
        ):
            ledger.attach(elsewhere)
        model_filter = begin(ledger)
        count(model_filter)
        ledger.attach(model_filter)  # once more, as every call of generate does
        Accountant(DELTA, filter_budget=BUDGET).attach(model_filter)
        count(model_filter)
        assert len(ledger.accountant.released_counts) == 2
        for one in (model_filter, PerModelFilter(MODELS, BUDGET, spent=model_filter.spent)):
            with pytest.raises(ValueError, match="beside a ledger has no state"):
                one.state()
        older = PerModelFilter.from_state(PerModelFilter(MODELS, BUDGET).state())
        ledger.attach(older)
        assert count(older) == 0.0
        with pytest.raises(ValueError, match="got none left"):
            count(older)
    with pytest.raises(LedgerClosedError, match="it was closed"):
        count(model_filter)
    going_on = PerModelFilter(MODELS, BUDGET, spent=np.full(MODELS, BUDGET.reserved))
    Accountant(DELTA, filter_budget=BUDGET).attach(going_on)
    with pytest.raises(ValueError, match="must be attached to its ledger"):
        count(going_on)


def test_totals_that_were_taken_from_a_ledger_release_nothing_more(path: Path) -> None:
    """They are no ledger: what is released beside them no one else would know of."""
    with Ledger.open(path, **SETTINGS) as ledger:
        count(begin(ledger))
    with Ledger.open(path, **SETTINGS) as ledger:
        taken = ledger.accountant
        for one in (taken, Accountant.from_state(taken.state())):
            with pytest.raises(ValueError, match="the only one of its accountant"):
                one.attach(PerModelFilter(MODELS, BUDGET))


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
