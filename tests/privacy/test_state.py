"""States of accountants come back to the bit at any moment, or raise a clear ValueError."""

from __future__ import annotations

import copy
import json
from contextlib import suppress

import numpy as np
import pytest
from accountant_cases import DELTA, Kind, Offer, pooled
from hypothesis import given, settings
from hypothesis import strategies as st
from state_cases import CASES, accountant

from adapmixed.privacy import Accountant, Caveat, Event, PublicAnswer, UnprotectedAnswer


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
    whole.charge(offer)
    again = Accountant.from_state(json.loads(text(whole)))
    assert text(again) == text(whole)
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
        with pytest.raises(ValueError, match="must be|Binding must have mechanism"):
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
