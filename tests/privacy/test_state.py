"""States of accountants come back to the bit at any moment, or raise a clear ValueError."""

from __future__ import annotations

import copy
import dataclasses
import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from accountant_cases import DELTA, Kind, Offer, pooled
from hypothesis import given, settings
from hypothesis import strategies as st
from state_cases import CASES, accountant

from adapmixed.privacy import Accountant, Caveat, Event, PublicAnswer, UnprotectedAnswer
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.encoding import write_array


def text(one: Accountant) -> str:
    return json.dumps(one.state(), allow_nan=False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_an_accountant_goes_on_as_if_it_had_not_stopped(case: str) -> None:
    _, events = CASES[case]
    whole = accountant(case)
    for number in range(5):
        again = Accountant.from_state(json.loads(text(whole)))
        assert text(again) == text(whole)
        whole.add(events(number))
        again.add(events(number))
        assert text(again) == text(whole)
        if case != "clipped":  # each distribution of losses takes a second
            assert repr(again.guarantee()) == repr(whole.guarantee())
            assert again.breakdown() == whole.breakdown()


@pytest.mark.parametrize("ensemble", [None, "a fingerprint"])
@pytest.mark.parametrize("individual", [True, False])
def test_a_bound_accountant_goes_on_bound(individual: bool, ensemble: str | None) -> None:
    if individual:
        whole = Accountant(DELTA, epsilon=2.0)
        offer = Offer(charges=np.full((5, 2), 0.01), ensemble=ensemble)
    else:
        whole, offer = Accountant(DELTA), Offer([pooled(num_models=5)], ensemble=ensemble)
    assert whole.goes_on_from(Accountant.from_state(whole.state()))
    whole.charge(offer)
    again = Accountant.from_state(json.loads(text(whole)))
    assert text(again) == text(whole) and again.goes_on_from(whole) and whole.goes_on_from(again)
    assert again.goes_on_from(Accountant(DELTA, epsilon=whole.epsilon))
    assert not Accountant(DELTA, epsilon=whole.epsilon).goes_on_from(whole)
    assert not again.goes_on_from(Accountant(1e-6, epsilon=whole.epsilon))
    other = Offer([], offer.charges, mechanism=Kind("another", offer.mechanism.measure))
    with pytest.raises(ValueError, match="what it is bound to, {'mechanism'"):
        again.charge(other)
    with pytest.raises(ValueError, match="must not be bound to a mechanism to take events"):
        again.add(PublicAnswer(1))
    same = Offer(offer.whole, offer.charges, mechanism=offer.mechanism, ensemble=ensemble)
    again.charge(same)
    assert again.queries == 2 * whole.queries
    elsewhere = Offer(offer.whole, offer.charges, mechanism=offer.mechanism, ensemble="another")
    with pytest.raises(ValueError, match="bound to, got another ensemble: .* retrained") as caught:
        again.charge(elsewhere)
    assert "a fingerprint" not in str(caught.value)  # a digest of the members


def _changed(case: str, *path: Any) -> dict[str, Any]:
    """Return the state after one call, with the entry at the path replaced."""
    written = copy.deepcopy(accountant(case).add(CASES[case][1](2)).state())
    entry: Any = written
    for key in path[:-2]:
        entry = entry[key]
    entry[path[-2]] = path[-1]
    return written


TOTALS = ("account", "totals")
COUNT = (*TOTALS, "counts", 0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("losses", "format_version", 3), "state must have settings, account|account, settings"),
        (("losses", "account", "more", 1), "account must have"),
        (("losses", "settings", "more", 1), "must have the fields delta, epsilon, adjacency"),
        (("losses", "settings", "delta", 0.0), "delta must be"),
        (("losses", "settings", "delta", "1e-5"), "delta must be float, got '1e-5'"),
        (("losses", "settings", "epsilon", -1.0), "epsilon must be"),
        (("losses", "settings", "adjacency", "add_remove"), "adjacency must be one of"),
        (("losses", *TOTALS, "more", 1), "totals must have"),
        (("losses", *TOTALS, "caveats", ["odd"]), "name must be one of"),
        (("losses", *TOTALS, "counts", {}), "must be list"),
        (("losses", *COUNT, "queries", 2.0), r"queries must be int, got 2\.0"),
        (("losses", *COUNT, "queries", -1), "queries must be an integer >= 0, got -1"),
        (("losses", *COUNT, "event", "Gift"), "event must be one of .*, got 'Gift'"),
        (("losses", *COUNT, "num_models", 4), "num_models must be the same"),
        (("losses", *TOTALS, "losses", "queries", -1), "queries must be >= 0, got -1"),
        (("losses", *TOTALS, "losses", "queries", True), "must be int, got True"),
        (("losses", *TOTALS, "losses", "adjacency", "swap"), "adjacency must be one of"),
        (("losses", *TOTALS, "losses", "orders", [2.0, 18.0]), "loss must have shape"),
        (("losses", *TOTALS, "losses", "orders", [0.5]), "orders must be > 1"),
        (("losses", *TOTALS, "losses", "total", "shape", [4, 1]), "must hold .* numbers"),
        (("losses", *TOTALS, "losses", "total", "data", "?"), "Only base64|base64|ncorrect padd"),
        (("losses", *TOTALS, "losses", "total", write_array(np.full((5, 1), -1.0))), ">= 0"),
        (("losses", *TOTALS, "losses", "total", write_array(np.full((5, 1), np.nan))), "not NaN"),
        (("losses", *TOTALS, "losses", "total", write_array(np.zeros((4, 1)))), "num_models must"),
        (("losses", *TOTALS, "spent", write_array(np.zeros(5))), "null without a budget"),
        (("losses", "account", "budget",
          {"measure": "zcdp", "amount": 1.0, "order": None, "largest": None}),
         "budget must follow from the settings"),
        (("a budget", "account", "budget", "largest", 0.1), "budget must follow from the settings"),
        (("clipped", *COUNT, "budget", 1), "queries must stay within the 1"),
        (("clipped", *COUNT, "budget", None), "budget must be int, got None"),
        (("a planned bound", *COUNT, "queries", 101), "queries must stay within the 100"),
        (("a planned pool", *COUNT, "scale", -1.0), "scale must be"),
        (("a budget", "settings", "epsilon", 2.0), "budget must follow from the settings"),
        (("a budget", "settings", "epsilon", None), "budget must follow from the settings"),
        (("a budget", "settings", "adjacency", "replace_one"), "budget must follow from the"),
        (("a budget", "account", "budget", "amount", 1.0), "budget must follow from the settings"),
        (("a budget", "account", "budget", None), "spent must be null without a budget"),
        (("a budget", *TOTALS, "spent", None), "charged must be 0 without spent, got 3"),
        (("a budget", *TOTALS, "spent", write_array(np.full(5, 9.9))), "within its budget"),
        (("a budget", *TOTALS, "spent", write_array(np.full(5, np.nan))), "not NaN"),
        (("a budget", *TOTALS, "spent", write_array(np.full((5, 1), 0.0))), "spent must have shap"),
        (("a budget", *TOTALS, "charged", 2.5), "must be int, got 2.5"),
        (("a budget", *TOTALS, "charged", -1), "charged must be an integer >= 0, got -1"),
    ],
)  # fmt: skip
def test_what_no_events_have_given_is_refused(changed: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Accountant.from_state(_changed(*changed))


def test_without_a_mechanism_no_largest_charge_is_believed() -> None:
    state = copy.deepcopy(accountant("a budget").state())
    larger = ShardBudget.for_epsilon(3.0, DELTA, None, "zero_out", 1e-4)
    state["account"]["budget"] = dataclasses.asdict(larger)
    with pytest.raises(ValueError, match="budget must follow from the settings"):
        Accountant.from_state(state)


def test_a_state_of_something_else_is_refused() -> None:
    for state in ({}, {"settings": {}}, {"settings": {}, "account": []}):
        with pytest.raises(ValueError, match="must have"):
            Accountant.from_state(state)
    bound = Accountant(DELTA)
    bound.bind(Kind(measure=("zcdp", None)), 5)
    written = bound.state()
    Accountant.from_state(written)
    for name, value in (("num_models", "5"), ("order", 2), ("mechanism", None), ("more", 1)):
        changed = copy.deepcopy(written)
        changed["account"]["binding"][name] = value
        with pytest.raises(ValueError, match="must be|must have the fields"):
            Accountant.from_state(changed)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.data())
def test_states_of_whatever_was_added_are_accepted(data: st.DataObject) -> None:
    """Events of every kind, in any order and number, give a state that is accepted."""
    case = data.draw(st.sampled_from([name for name in CASES if name != "unprotected"]))
    added = accountant(case)
    others: list[Event] = [PublicAnswer(3), UnprotectedAnswer(1), Caveat("base")]
    for number in data.draw(st.lists(st.integers(1, 6), max_size=6)):
        events = CASES[case][1](number)
        if data.draw(st.booleans()):
            events = [*events, data.draw(st.sampled_from(others))]
        with suppress(ValueError):  # a spent budget
            added.add(events)
        assert text(Accountant.from_state(json.loads(text(added)))) == text(added)
