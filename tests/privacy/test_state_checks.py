"""States that no events have given are refused; those that some have are not."""

from __future__ import annotations

import base64
import copy
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_cases import DELTA, losses, state
from state_cases import CASES, accountant

from adapmixed.privacy import (
    Accountant,
    Caveat,
    Event,
    GaussianScreening,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
    c_alpha,
)


def _changed(case: str, *path: Any) -> dict[str, Any]:
    """The state after one call, with the entry at the path replaced by the last argument."""
    written = copy.deepcopy(accountant(case).add(CASES[case][1](2)).state())
    entry: Any = written
    for key in path[:-2]:
        entry = entry[key]
    entry[path[-2]] = path[-1]
    return written


TOTAL = ("running", "total", "fields")

COUNTED = [{"num_models": 5, "threshold": 0.1, "sigma": 100.0, "noisy_count": 3}]

SCREENED_FREE = {"rho": 0.0, "screened": 2, "single": None}

SCREENED_ONCE = {"rho": 0.5, "screened": 1, "single": 0.5}

SCREENED_OFTEN = {"rho": 50.5, "screened": 101, "single": 0.5}

SCREENED_MIXED = {"rho": 0.5, "screened": 2, "single": None}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("losses", "format_version", 4), "accountant.format_version must be 3, got 4"),
        (("losses", "format_version", True), "accountant.format_version must be 1, got True"),
        (
            ("pool", "format_version", 1),
            "PoolTotal must have the fields|Running must have the fields",
        ),
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
        (("filter", "format_version", 2), "filter_budget FilterBudget must have the fields"),
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
        (("pool", *TOTAL, "removed", 0.0), "removed must be >= replaced, where N is count"),
        (("a pool of a constant N", *TOTAL, "removed", 0.0), "removed must be rho, where N is con"),
        (("a pool of a constant N", *TOTAL, "constant_models", False), "removed must be >= repl"),
        (("a pool of a constant N", *TOTAL, "constant_models", None), "constant_models must be gi"),
        (("a planned pool", *TOTAL, "constant_models", True), "constant_models must be the plan's"),
        (("a planned pool", *TOTAL, "removed", 1e9), "removed must be .* of the plan alone"),
        (("filter", "running", "queries", 2), "spent must be 0.0 without private answers"),
        (("filter", "running", "screening", SCREENED_ONCE), "screened must be 0 under a filter"),
        (("filter", *TOTAL, "budget", "order", 5.0), "budget must be the accountant's"),
        (("counts", *TOTAL, "budget", "releases", 99), "budget must be the accountant's"),
        (("counts", "filter_budget", "sigma", 200.0), "budget must be the accountant's"),
        (("counts", "filter_budget", "sigma", None), "sigma must be given iff releases > 0"),
        (("counts", "filter_budget", "releases", 2000), "releases must leave some of the budget"),
        (("counts", "running", "queries", 0), "spent must be 0.02.* without private answers"),
        (("counts", *TOTAL, "counts", COUNTED * 101), "counts must be those that budget reserves"),
        (("filter", *TOTAL, "counts", COUNTED), "counts must be those that budget reserves"),
        (("counts", *TOTAL, "counts", [COUNTED[0] | {"sigma": 99.0}]), "of the budget's sigma"),
        (("counts", *TOTAL, "counts", [COUNTED[0] | {"num_models": 4}]), "and of num_models"),
        (("counts", *TOTAL, "counts", [COUNTED[0] | {"noisy_count": 1.0}]), "must be int"),
        (("counts", *TOTAL, "counts", {}), "must be list"),
    ],
)
def test_what_no_events_have_given_is_refused(changed: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accountant.from_state(_changed(*changed))


COST = c_alpha(18.0, DELTA)


@pytest.mark.parametrize(
    ("case", "place", "value", "words"),
    [
        ("losses", 0, -0.1, r"mixing must be in \[0.0, inf\] and not NaN"),
        ("losses", 0, np.nan, r"mixing must be in \[0.0, inf\] and not NaN"),
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
        ("filter", 1, np.nan, r"spent must be in \[0.0, 0.3\] and not NaN"),
        ("filter", 1, 0.4, r"spent must be in \[0.0, 0.3\] and not NaN"),
        ("filter", 1, -1e-9, r"spent must be in \[0.0, 0.3\] and not NaN"),
        ("counts", 1, 0.0199, r"spent must be in \[0.02.*, 0.3\] and not NaN"),
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
