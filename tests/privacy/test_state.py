"""States of accountants and filters: given back to the bit at any moment, or refused in words."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ledger_cases import DELTA, losses, state

from adapmixed.privacy import (
    Accountant,
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    FilterBudget,
    GaussianScreening,
    IndividualCharge,
    PerModelFilter,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.running import MECHANISMS
from adapmixed.privacy.state import TOTALS

BUDGET = FilterBudget("renyi", 0.3, DELTA, 4.0)
SCREENED = GaussianScreening(5, 2, 0.1, 1 / 3)


def charge(seed: int, models: int = 5) -> Event:
    values = np.random.default_rng(seed).exponential(0.01, (models, 3))
    return IndividualCharge("renyi", 4.0, values)


# Arguments of the accountant, and the n-th call of add.
CASES: dict[str, tuple[dict[str, Any], Callable[[int], list[Event]]]] = {
    "nothing": ({}, lambda n: []),
    "public": ({"adjacency": "replace_one"}, lambda n: [PublicAnswer(n), Caveat("base")]),
    "unprotected": ({}, lambda n: [UnprotectedAnswer(1), Caveat("seeded"), Caveat("shards")]),
    "losses": ({}, lambda n: [losses(n, positions=n), SCREENED, PublicAnswer(1)]),
    "the paper's rule": ({"rule": "paper"}, lambda n: [losses(n, positions=3)]),
    "orders": (
        {"order_weights": (0.25, 1 / 3), "adjacency": "add_remove"},
        lambda n: [losses(n, orders=(2.5, 18.0))],
    ),
    "a planned bound": ({}, lambda n: [RenyiBound(3.0, 0.1, 5, n, "zero_out", budget=100)]),
    "a published bound": ({}, lambda n: [RenyiBound(3.0, float("inf"), 5, 1, "zero_out", True)]),
    "screenings": ({}, lambda n: [GaussianScreening(5, 1, 0.1 * n, 0.5)]),
    "clipped": ({"adjacency": "replace_one"}, lambda n: [ClippedAnswer(0.8, 1.5, 5, n, 100)]),
    "clipped, screened": ({}, lambda n: [SCREENED, ClippedAnswer(0.8, 1.5, 5, 2, 100)]),
    "pool": ({}, lambda n: [BoundedRangeAnswer(0.1 * n, -0.25, 1 / 3, 5, n), SCREENED]),
    "a planned pool": ({}, lambda n: [BoundedRangeAnswer(2.0, -0.25, 0.5, 5, n, 100)]),
    "filter": ({"filter_budget": BUDGET}, lambda n: [charge(n), PublicAnswer(n)]),
}


def accountant(case: str) -> Accountant:
    """That of a case, before its first events."""
    made = Accountant(DELTA, **CASES[case][0])
    if made.filter_budget is not None:
        made.attach(PerModelFilter(5, made.filter_budget))
    return made


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


def _changed(case: str, *path: Any) -> dict[str, Any]:
    """The state after one call, with the entry at the path replaced by the last argument."""
    written = copy.deepcopy(accountant(case).add(CASES[case][1](2)).state())
    entry: Any = written
    for key in path[:-2]:
        entry = entry[key]
    entry[path[-2]] = path[-1]
    return written


TOTAL = ("running", "total", "fields")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("losses", "format_version", 2), "accountant.format_version must be 1, got 2"),
        (("losses", "format_version", True), "accountant.format_version must be 1, got True"),
        (("losses", "more", 1), "accountant must have the fields"),
        (("losses", "running", "more", 1), "accountant.running Running must have the fields"),
        (("losses", "running", "queries", 2.0), r"queries must be int, got 2\.0"),
        (("losses", "running", "queries", -1), "counts must be >= 0"),
        (("losses", "running", "public_queries", 50), "public_queries must be <= queries"),
        (("losses", "running", "caveats", ["odd"]), "caveats must be of"),
        (("losses", "running", "adjacency", None), "adjacency must be given"),
        (("losses", "running", "num_models", 4), r"mixing must have shape \(4, 1\)"),
        (("losses", "running", "num_models", None), "num_models must be given"),
        (("losses", "arrays", ""), "needs 40 bytes of charges"),
        (("losses", "arrays", "AAAA" * 100), "accountant.arrays must hold 48 bytes, got 300"),
        (("losses", "arrays", "?"), "accountant.arrays"),
        (("losses", "delta", 1e-4), "delta, rule and order_weights must be the accountant's"),
        (("losses", "rule", "paper"), "delta, rule and order_weights must be the accountant's"),
        (("losses", "running", "total", "kind", "X"), "total must be one of RenyiTotal"),
        (("losses", *TOTAL, "orders", []), "orders must be > 1"),
        (("a planned bound", *TOTAL, "planned_queries", 101), "within the budget"),
        (("a planned bound", *TOTAL, "plan", None), "within the budget"),
        (("clipped", *TOTAL, "answered", 101), "answered must be within the budget"),
        (("clipped", *TOTAL, "setting", "num_models", 6), "num_models must be the same"),
        (("pool", *TOTAL, "rho", -1.0), "rho must be >= 0"),
        (("a planned pool", *TOTAL, "answered", 101), "answered must be within the budget"),
        (("filter", "filter_budget", "amount", 0.2), "budget must be the accountant's"),
        (("filter", "filter_budget", None), "budget must be the accountant's"),
        (("screenings", "running", "screening", "rho", -1.0), "screening.rho must be >= 0"),
    ],
)
def test_what_no_events_have_given_is_refused(changed: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accountant.from_state(_changed(*changed))


@pytest.mark.parametrize("value", [-0.1, np.nan])
def test_losses_that_cannot_be_are_refused(value: float) -> None:
    written = Accountant(DELTA).add(losses(1)).state()
    good = Accountant.from_state(written)._state.total
    assert good is not None
    spoilt = np.concatenate([[value], np.zeros(4), good.conversion])  # type: ignore[union-attr]
    written["arrays"] = base64.b64encode(spoilt.astype("<f8").tobytes()).decode()
    with pytest.raises(ValueError, match=r"mixing must be in \[0, inf\] and not NaN"):
        Accountant.from_state(written)


def answered(model_filter: PerModelFilter, seed: int) -> np.ndarray[Any, Any]:
    charges = np.random.default_rng(seed).exponential(0.02, (5, 4))
    charges[0, 0] = np.inf
    return model_filter.admit(charges)


@pytest.mark.parametrize("releases", [0, 2])
def test_a_filter_goes_on_as_if_it_had_not_stopped(releases: int) -> None:
    sigma = 30.0 if releases else None
    whole = PerModelFilter(5, BUDGET, releases=releases, sigma=sigma)
    for number in range(6):
        text = json.dumps(whole.state(), allow_nan=False)
        again = PerModelFilter.from_state(json.loads(text))
        other = PerModelFilter(5, BUDGET, releases=releases, sigma=sigma)
        other.restore(json.loads(text))
        assert json.dumps(again.state(), allow_nan=False) == text
        expected = answered(whole, number)
        for one in (again, other):
            assert np.array_equal(answered(one, number), expected)
            assert one.spent.tobytes() == whole.spent.tobytes()
            assert one.state() == whole.state()
    assert not expected.all()  # some have retired
    if releases:
        secure = SimpleNamespace(seeded=False)
        one, other = (each.noisy_count(0.1, 0.5, rng=secure) for each in (whole, again))
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
        ("answers", -1, r"filter\.answers must be in"),
        ("left", 1, r"filter\.left must be in \[0, 0\]"),
        ("spent", [4], "spent must be float64 of shape|arrays must hold 32 bytes"),
        ("num_models", 0, "num_models must be an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=words):
            PerModelFilter.from_state(written | {key: value})
    released = PerModelFilter(5, BUDGET, releases=1, sigma=30.0)
    under = base64.b64encode(np.full(5, released._reserved * (1 - 1e-12)).tobytes()).decode()
    with pytest.raises(ValueError, match=r"filter\.spent must lie in"):
        PerModelFilter.from_state(released.state() | {"arrays": under})
    too_small = {**written, "budget": {**written["budget"], "amount": 1e-9}}
    with pytest.raises(ValueError, match=r"filter\.spent must lie in"):
        PerModelFilter.from_state(too_small)
