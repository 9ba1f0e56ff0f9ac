"""States of accountants and filters: given back to the bit at any moment, or refused in words."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_cases import DELTA, state
from state_cases import BUDGET, CASES, accountant

from adapmixed.privacy import (
    Accountant,
    FilterBudget,
    PerModelFilter,
)
from adapmixed.privacy.running import MECHANISMS
from adapmixed.privacy.state import TOTALS
from adapmixed.rng import SeededRandom


@pytest.mark.parametrize("case", CASES)
def test_an_accountant_goes_on_as_if_it_had_not_stopped(case: str) -> None:
    _, events = CASES[case]
    whole = accountant(case)
    for number in range(5):
        text = json.dumps(whole.state(), allow_nan=False)
        again = Accountant.from_state(json.loads(text))
        assert state(again) == state(whole)
        assert json.dumps(again.state(), allow_nan=False) == text
        whole.add(events(number))
        again.add(events(number))
        assert state(again) == state(whole)
        assert again.breakdown() == whole.breakdown()


def test_every_total_is_among_them() -> None:
    kinds = set()
    for case, (_, events) in CASES.items():
        total = accountant(case).add(events(1)).state()["running"]["total"]
        kinds.add(None if total is None else total["kind"])
    assert kinds == {None, *(kind.__name__ for kind in TOTALS)}
    assert set(TOTALS) == set(MECHANISMS)


def test_every_field_is_written() -> None:
    """A field that a total gains later is not forgotten in silence."""
    for kind, fields in TOTALS.items():
        assert set(fields) == set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    running = Accountant(DELTA)._state
    assert set(Accountant(DELTA).state()["running"]) == set(vars(running))


def answered(model_filter: PerModelFilter, seed: int) -> np.ndarray[Any, Any]:
    charges = np.random.default_rng(seed).exponential(0.02, (5, 4))
    charges[0, 0] = np.inf
    return model_filter.admit(charges)


@pytest.mark.parametrize("releases", [0, 2])
def test_a_filter_goes_on_as_if_it_had_not_stopped(releases: int) -> None:
    budget = replace(BUDGET, releases=releases, sigma=30.0 if releases else None)
    whole = PerModelFilter(5, budget)
    for number in range(6):
        text = json.dumps(whole.state(), allow_nan=False)
        again = PerModelFilter.from_state(json.loads(text))
        other = PerModelFilter(5, budget)
        other.restore(json.loads(text))
        assert json.dumps(again.state(), allow_nan=False) == text
        expected = answered(whole, number)
        for one in (again, other):
            assert np.array_equal(answered(one, number), expected)
            assert one.spent.tobytes() == whole.spent.tobytes()
            assert one.state() == whole.state()
    assert not expected.all()  # some have retired
    if releases:
        one, other = (
            each.noisy_count(0.1, rng=SimpleNamespace(seeded=False, bits=SeededRandom(1).bits))
            for each in (whole, again)
        )
        assert one == other
        assert PerModelFilter.from_state(whole.state())._left == 1


def test_a_filter_refuses_another_state() -> None:
    filled = PerModelFilter(5, BUDGET)
    answered(filled, 0)
    written = filled.state()
    with pytest.raises(ValueError, match="restore needs a filter that is new, got 4 answers"):
        filled.restore(written)
    with pytest.raises(ValueError, match=r"filter\.num_models must be 4, got 5"):
        PerModelFilter(4, BUDGET).restore(written)
    with pytest.raises(ValueError, match=r"filter\.budget must be"):
        PerModelFilter(5, FilterBudget("renyi", 0.4, DELTA, 4.0)).restore(written)
    for key, value, words in (
        ("format_version", 2, r"filter\.format_version must be 1"),
        ("answers", -1, r"filter\.answers must be"),
        ("left", 1, r"filter\.left must be in \[0, 0\]"),
        ("spent", [4], "spent must be float64 of shape|arrays must hold 32 bytes"),
        ("num_models", 0, "num_models must be an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=words):
            PerModelFilter.from_state(written | {key: value})
    released = PerModelFilter(5, replace(BUDGET, releases=1, sigma=30.0))
    reserved = released.budget.reserved
    under = base64.b64encode(np.full(5, reserved * (1 - 1e-12)).tobytes()).decode()
    with pytest.raises(ValueError, match=r"filter\.spent must lie in"):
        PerModelFilter.from_state(released.state() | {"arrays": under})
    too_small = {**written, "budget": {**written["budget"], "amount": 1e-9}}
    with pytest.raises(ValueError, match=r"filter\.spent must lie in"):
        PerModelFilter.from_state(too_small)
