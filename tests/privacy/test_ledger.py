"""Charging and reopening: the same totals, the same settings, nothing without need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_cases import SETTINGS, answer, every_event, make, state

from adapmixed.privacy import (
    Accountant,
    FilterBudget,
    IndividualCharge,
    Ledger,
    LedgerError,
    PerModelFilter,
    PublicAnswer,
    RenyiBound,
)
from adapmixed.privacy.ledger import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerMismatchError,
    LedgerWriteError,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def test_reopening_gives_the_same_totals_in_every_bit(path: Path) -> None:
    plain = Accountant(1e-5)
    with Ledger.open(path, **SETTINGS) as ledger:
        assert (ledger.charges, ledger.totals.kind) == (0, "public")
        for number in range(7):
            plain.add(answer(number))
            ledger.charge(answer(number))
            assert state(ledger.accountant) == state(plain)
    with Ledger.open(path, **SETTINGS) as ledger:
        assert ledger.charges == 7
        assert state(ledger.accountant) == state(plain)
        plain.add(answer(99))
        ledger.charge(answer(99))
    reading = Ledger.verify(path)
    assert (reading.charges, reading.behind) == (8, 0)
    assert state(reading.accountant) == state(plain)
    assert reading.totals == plain.epsilon()


def test_every_rule_and_every_event_is_replayed(path: Path) -> None:
    options: dict[str, Any] = dict(delta=1e-6, order_weights=(0.75, 0.25), configuration="x" * 10)
    groups = [[event] for event in every_event() if getattr(event, "num_models", 2) == 2]
    groups = [group for group in groups if getattr(group[0], "orders", (1, 2)) != (2.5,)]
    groups.append([PublicAnswer(3), PublicAnswer(4)])
    plain = Accountant(1e-6, order_weights=(0.75, 0.25))
    with Ledger.open(path, **options) as ledger:
        for group in groups:
            try:
                plain.add(group)
            except ValueError:
                with pytest.raises(ValueError):
                    ledger.charge(group)
                continue
            ledger.charge(group[0] if len(group) == 1 else iter(group))
    with Ledger.open(path, **options) as ledger:
        assert state(ledger.accountant) == state(plain)
        assert ledger.totals.queries > 2**70


def test_a_fixed_budget_is_spent_across_openings(path: Path) -> None:
    bound = RenyiBound(3.0, 0.1, 4, 2, "zero_out", budget=3)
    with Ledger.open(path, **SETTINGS) as ledger:
        ledger.charge(bound)
        first = ledger.totals
    with Ledger.open(path, **SETTINGS) as ledger:
        with pytest.raises(ValueError, match="queries must stay within the budget of 3"):
            ledger.charge(bound)
        ledger.charge(RenyiBound(3.0, 0.1, 4, 1, "zero_out", budget=3))  # still usable
        assert (ledger.charges, ledger.totals.epsilon) == (2, first.epsilon)


def test_charges_of_a_filter_need_it_attached_at_every_opening(path: Path) -> None:
    budget = FilterBudget("zcdp", 1.0, 1e-5)
    settings = dict(SETTINGS, filter_budget=budget)
    event = IndividualCharge("zcdp", None, np.full((2, 1), 0.125))
    for number in range(3):
        with Ledger.open(path, **settings) as ledger:
            with pytest.raises(ValueError, match=r"model_filter must be attached .* by attach\("):
                ledger.charge([PublicAnswer(1), event])
            spent = ledger.accountant.individual_spent
            if number:
                with pytest.raises(ValueError, match="what its models have spent before"):
                    ledger.attach(PerModelFilter(2, budget))
            with pytest.raises(ValueError, match="must have the accountant's budget"):
                ledger.attach(PerModelFilter(2, replace(budget, releases=1, sigma=9.0)))
            ledger.attach(PerModelFilter(2, budget, spent=spent))
            ledger.charge(event)
            ledger.charge([event, PublicAnswer(1)])
            assert ledger.charges == 2 * (number + 1)
    spent = Ledger.verify(path).accountant.individual_spent
    assert spent is not None and (spent >= 0.75).all()


def test_what_cannot_be_charged_is_refused_before_anything_is_written(path: Path) -> None:
    with make(path, 1) as ledger:
        for bad, words in [
            ([], "events must hold at least one event, got none"),
            ("loss", "events must be privacy events, got str"),
            (3, "events must be privacy events, got int"),
            (answer(0, models=6), "num_models must be the same in every event"),
        ]:
            with pytest.raises(ValueError, match=words):
                ledger.charge(bad)  # type: ignore[arg-type]
        ledger.charge(answer(1))
        assert Ledger.verify(path).charges == ledger.charges == 2


def test_the_totals_cannot_be_added_to_beside_the_ledger(path: Path) -> None:
    with make(path, 1) as ledger:
        ledger.accountant.add(answer(3))
        assert ledger.accountant.queries == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": 1e-6}, "delta must be what the ledger was created with, 1e-05, got 1e-06"),
        ({"rule": "paper"}, "rule must be .* 'per_model', got 'paper'"),
        ({"order_weights": [1.0]}, "order_weights must be"),
        ({"configuration": "another"}, "configuration must be .* 'a mechanism', got 'another'"),
    ],
)
def test_a_changed_configuration_is_refused(path: Path, changes: Any, words: str) -> None:
    make(path, 2).close()
    with pytest.raises(LedgerMismatchError, match=words):
        Ledger.open(path, **{**SETTINGS, **changes})
    with Ledger.open(path, **SETTINGS) as ledger:
        assert ledger.charges == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta": 0.0}, "delta must be in"),
        ({"rule": "mine"}, "rule must be one of"),
        ({"configuration": ""}, "configuration must be a text that is not empty, got ''"),
        ({"configuration": None}, "configuration must be a text"),
    ],
)
def test_bad_arguments_leave_no_files(path: Path, changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Ledger.open(path, **{**SETTINGS, **changes})
    with pytest.raises(LedgerWriteError, match="must be a ledger, there is no such file"):
        Ledger.open(path, **SETTINGS, create=False)
    with pytest.raises(LedgerWriteError, match="must be a ledger, there is no such file"):
        Ledger.verify(path)
    assert not list(path.parent.iterdir())


def test_the_errors_are_values_or_the_systems() -> None:
    for kind in (LedgerCorruptError, LedgerMismatchError, LedgerClosedError):
        assert issubclass(kind, LedgerError) and issubclass(kind, ValueError)
    for system in (LedgerBusyError, LedgerWriteError):
        assert issubclass(system, LedgerError) and issubclass(system, OSError)


def test_closed_means_closed(path: Path) -> None:
    ledger = make(path, 1)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerClosedError, match="must be opened again: it was closed"):
        ledger.charge(answer(1))
    assert (ledger.charges, ledger.accountant.queries) == (1, 1)
