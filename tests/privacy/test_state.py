"""States of accountants and filters: given back to the bit at any moment, or refused in words."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    c_alpha,
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
    "many losses": ({}, lambda n: [losses(n, positions=1000)]),
    "a planned bound": ({}, lambda n: [RenyiBound(3.0, 0.1, 5, n, "zero_out", budget=100)]),
    "a published bound": ({}, lambda n: [RenyiBound(3.0, float("inf"), 5, 1, "zero_out", True)]),
    "no loss yet": ({}, lambda n: [losses(n, positions=0)]),
    "screenings": ({}, lambda n: [GaussianScreening(5, 1, 0.1 * n, 0.5)]),
    "clipped": ({"adjacency": "replace_one"}, lambda n: [ClippedAnswer(0.8, 1.5, 5, n, 100)]),
    "clipped, screened": ({}, lambda n: [SCREENED, ClippedAnswer(0.8, 1.5, 5, 2, 100)]),
    "pool": ({}, lambda n: [BoundedRangeAnswer(0.1 * n, -0.25, 1 / 3, 5, n), SCREENED]),
    "a pool of a constant N": (
        {"adjacency": "add_remove"},
        lambda n: [BoundedRangeAnswer(0.1 * n, -0.25, 0.5, 5, n, None, n % 2 == 0)],
    ),
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
SCREENED_FREE = {"rho": 0.0, "screened": 2, "single": None}
SCREENED_ONCE = {"rho": 0.5, "screened": 1, "single": 0.5}
SCREENED_OFTEN = {"rho": 50.5, "screened": 101, "single": 0.5}
SCREENED_MIXED = {"rho": 0.5, "screened": 2, "single": None}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("losses", "format_version", 3), "accountant.format_version must be 2, got 3"),
        (("losses", "format_version", True), "accountant.format_version must be 1, got True"),
        (("pool", "format_version", 1), "PoolTotal must have the fields"),
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
        (("a planned bound", *TOTAL, "plan", None), "realised must be true without bounds"),
        (("clipped", *TOTAL, "answered", 101), "answered must be within the budget"),
        (("clipped", *TOTAL, "setting", "num_models", 6), "num_models must be the same"),
        (("pool", *TOTAL, "rho", -1.0), "rho must be >= 0"),
        (("a planned pool", *TOTAL, "answered", 101), "answered must be within the budget"),
        (("filter", "filter_budget", "amount", 0.2), "budget must be the accountant's"),
        (("filter", "filter_budget", None), "filter must be null without a budget"),
        (("screenings", "running", "screening", "rho", -1.0), "screening.rho must be >= 0"),
        # The table of privacy/state_checks.py, row by row.
        (("losses", "running", "public_queries", -1), "public_queries must be >= 0"),
        (("losses", "running", "releases", -1), "releases must be >= 0"),
        (("clipped", "running", "total", None), "public_queries must be queries where total is"),
        (("public", "running", "unprotected", True), "unprotected must be false without"),
        (("clipped", "running", "unprotected", True), "neither public nor unprotected"),
        (("losses", "running", "screening", "screened", -1), "screened must be >= 0"),
        (("losses", "running", "screening", "screened", 0), "must be 0 if none is screened"),
        (("losses", "running", "screening", "screened", 4), "rho must be 4 times single"),
        (("losses", "running", "screening", "screened", 10**400), "counts must be those"),
        (("losses", "running", "screening", "rho", 0.0), "rho must be 2 times single"),
        (("losses", "running", "screening", "rho", "inf"), "rho must be 2 times single"),
        (("losses", "running", "screening", "single", 0.0), "rho must be 2 times single"),
        (("screenings", "running", "screening", "single", None), "single must be given for one"),
        (("losses", "running", "screening", SCREENED_FREE), "rho must be > 0 where costs differ"),
        (("pool", "running", "adjacency", "zero_out"), "adjacency must be null without Rényi"),
        (("losses", "running", "adjacency", "replace_one"), "adjacency must be one of"),
        (("losses", "adjacency", "zero_out"), "adjacency must be the accountant's, 'zero_out'"),
        (("losses", "running", "num_models", 0), "num_models must be >= 1"),
        (("losses", "running", "filter", "x"), "filter must be null without a budget"),
        (("losses", "running", "releases", 1), "releases must be of a filter"),
        (("losses", *TOTAL, "orders", [18.0, 18.0]), "orders must be > 1 and distinct"),
        (("losses", *TOTAL, "orders", ["inf"]), "orders must be > 1 and distinct"),
        (("losses", *TOTAL, "orders", [2.0, 18.0]), r"mixing must have shape \(5, 2\)"),
        (("orders", *TOTAL, "bounded", True), "orders must be one with rule 'paper' and for b"),
        (("orders", *TOTAL, "orders", [2.5, 3.0, 18.0]), "order_weights must be one per order"),
        (("losses", *TOTAL, "conversion", [1, 1]), r"conversion must have shape \(1,\)"),
        (("losses", *TOTAL, "realised", False), "realised must be true without bounds"),
        (("losses", *TOTAL, "published", True), "published must be false without bounds"),
        (("a published bound", *TOTAL, "bounded", False), "realised must be true without bounds"),
        (("a planned bound", *TOTAL, "plan", [0, 0.1]), "plan must have a budget >= 1"),
        (("a planned bound", *TOTAL, "plan", [100, -0.1]), "plan must have a budget >= 1"),
        (("a planned bound", *TOTAL, "plan", [200, 0.1]), "mixing must be >= 20.0"),
        (("a planned bound", *TOTAL, "plan", [100, "inf"]), "mixing must be >= inf"),
        (("a planned bound", *TOTAL, "planned_queries", -1), "within the budget"),
        (("a planned bound", *TOTAL, "planned_queries", 1), "must be all that are not public"),
        (("a planned bound", *TOTAL, "planned_queries", 3), "must be <= the queries that are not"),
        (("a planned bound", "running", "queries", 3), "must be all that are not public"),
        (("many losses", "running", "queries", 10**13), "mixing must be >= 1"),
        (("clipped", *TOTAL, "answered", 1), "answered must be the queries that are neither"),
        (("clipped", *TOTAL, "answered", -1), "answered must be within the budget"),
        (("clipped", *TOTAL, "setting", "queries", 1), "setting.queries must be 0"),
        (("clipped", *TOTAL, "setting", "budget", None), "setting must have a budget"),
        (("clipped, screened", "running", "screening", SCREENED_OFTEN), "screened must be within"),
        (("clipped, screened", "running", "screening", SCREENED_MIXED), "single must be one cost"),
        (("pool", *TOTAL, "unplanned", False), "answered must be the queries that are neither"),
        (("a planned pool", *TOTAL, "unplanned", True), "unplanned must be false where all"),
        (("a planned pool", *TOTAL, "rho", 0.0), "rho must be >= 1.12"),
        (("a planned pool", *TOTAL, "rho", 2.0), "rho must be 1.12.* of the plan alone"),
        (("a planned pool", *TOTAL, "replaced", 0.0), "replaced must be >= 4.5"),
        (("a planned pool", *TOTAL, "replaced", "inf"), "replaced must be 4.5.* of the plan alone"),
        (("a planned pool", *TOTAL, "plan", "budget", None), "plan must have a budget"),
        (("a planned pool", *TOTAL, "plan", "queries", 1), "plan.queries must be 0"),
        (("a planned pool", *TOTAL, "plan", "num_models", 6), "num_models must be the same"),
        (("pool", *TOTAL, "replaced", 0.0), "replaced must be 4 times rho"),
        (("pool", *TOTAL, "rho", 0.0), "replaced must be 4 times rho"),
        (("pool", *TOTAL, "removed", 0.0), "removed must be between rho and replaced"),
        (("pool", *TOTAL, "removed", 1e9), "removed must be between rho and replaced"),
        (("filter", "running", "queries", 2), "spent must be 0 without private answers"),
        (("filter", "running", "screening", SCREENED_ONCE), "screened must be 0 under a filter"),
        (("filter", *TOTAL, "budget", "order", 5.0), "budget must be the accountant's"),
    ],
)
def test_what_no_events_have_given_is_refused(changed: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accountant.from_state(_changed(*changed))


COST = c_alpha(18.0, DELTA)


@pytest.mark.parametrize(
    ("case", "place", "value", "words"),
    [
        ("losses", 0, -0.1, r"mixing must be in \[0, inf\] and not NaN"),
        ("losses", 0, np.nan, r"mixing must be in \[0, inf\] and not NaN"),
        ("losses", 4, 0.0, "mixing must be >= 2e-12"),
        ("losses", 4, 1.9e-12, "mixing must be >= 2e-12"),
        ("losses", 5, np.nan, "conversion must be"),
        ("losses", 5, np.inf, "conversion must be"),
        ("losses", 5, -np.inf, "conversion must be"),
        ("losses", 5, 0.0, "conversion must be"),
        ("losses", 5, COST * (1 - 1e-9), "conversion must be"),
        ("losses", 5, COST * (1 + 1e-9), "conversion must be"),
        ("a planned bound", 2, 9.99, "mixing must be >= 10.0"),
        ("a planned bound", 2, 11.0, "mixing must be the same for all without losses"),
        ("no loss yet", 0, 0.5, "mixing must be 0 without private answers"),
        ("filter", 1, np.nan, r"spent must be in \[0, 0.3\] and not NaN"),
        ("filter", 1, 0.4, r"spent must be in \[0, 0.3\] and not NaN"),
        ("filter", 1, -1e-9, r"spent must be in \[0, 0.3\] and not NaN"),
    ],
)
def test_amounts_that_cannot_be_are_refused(
    case: str, place: int, value: float, words: str
) -> None:
    written = accountant(case).add(CASES[case][1](2)).state()
    amounts = np.frombuffer(base64.b64decode(written["arrays"]), dtype="<f8").copy()
    Accountant.from_state(written)
    amounts[place] = value
    written["arrays"] = base64.b64encode(amounts.tobytes()).decode()
    with pytest.raises(ValueError, match=f"accountant: {words}"):
        Accountant.from_state(written)


def test_another_machines_logarithms_are_never_taken_for_less() -> None:
    written = Accountant(DELTA).add(losses(1)).state()
    amounts = np.frombuffer(base64.b64decode(written["arrays"]), dtype="<f8").copy()
    for factor in (1 - 1e-15, 1 + 1e-15):
        amounts[5] = COST * factor
        written["arrays"] = base64.b64encode(amounts.tobytes()).decode()
        total = Accountant.from_state(written)._state.total
        assert total.conversion[0] == max(COST, COST * factor)  # type: ignore[union-attr]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.data())
def test_states_of_whatever_was_added_are_accepted(data: st.DataObject) -> None:
    """Every kind of events, in any order and number, public, caveats and unprotected between."""
    case = data.draw(st.sampled_from([name for name in CASES if name != "unprotected"]))
    added = accountant(case)
    for number in data.draw(st.lists(st.integers(1, 6), max_size=6)):
        events = CASES[case][1](number)
        if case == "screenings":
            events = [
                GaussianScreening(5, number, data.draw(st.sampled_from([0.0, 1e-170, 0.3])), 0.5)
            ]
        if case.startswith("a ") and data.draw(st.booleans()):
            events += [replace(events[0], budget=None, queries=data.draw(st.integers(0, 2)))]
        if case in ("losses", "no loss yet") and data.draw(st.booleans()):
            events += [RenyiBound(18.0, 0.25, 5, number - 1, "add_remove")]
        others: list[Event] = [PublicAnswer(number), UnprotectedAnswer(1), Caveat("base")]
        if data.draw(st.booleans()):
            events += [data.draw(st.sampled_from(others))]
        with suppress(ValueError):  # a spent budget
            added.add(events)
        text = json.dumps(added.state(), allow_nan=False)
        assert state(Accountant.from_state(json.loads(text))) == state(added)


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
        drawn = lambda *_, **__: 0.5  # noqa: E731
        one, other = (each.noisy_count(0.1, drawn, rng=secure) for each in (whole, again))
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
    released = PerModelFilter(5, BUDGET, releases=1, sigma=30.0)
    under = base64.b64encode(np.full(5, released._reserved * (1 - 1e-12)).tobytes()).decode()
    with pytest.raises(ValueError, match=r"filter\.spent must lie in"):
        PerModelFilter.from_state(released.state() | {"arrays": under})
    too_small = {**written, "budget": {**written["budget"], "amount": 1e-9}}
    with pytest.raises(ValueError, match=r"filter\.spent must lie in"):
        PerModelFilter.from_state(too_small)
