"""Events survive writing and reading in every bit, and unknown text raises."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ledger_cases import every_event

from adapmixed.errors import LedgerCorruptError
from adapmixed.privacy import Event, RenyiBound
from adapmixed.privacy.encoding import (
    EVENTS,
    canonical,
    parse,
    read_array,
    read_event,
    to_json,
    write_array,
)
from adapmixed.privacy.ledger import Record


def same(one: Any, other: Any) -> bool:
    """Return True if two events are equal in type and in bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return repr(one) == repr(other)


def again(event: Event) -> Event:
    """Write the event as text and return the event that is read back."""
    return read_event(parse(canonical(to_json(event))))


def test_every_event_of_the_accountant_is_known_with_all_its_fields() -> None:
    assert set(EVENTS.values()) == set(typing.get_args(Event))
    assert {type(event) for event in every_event()} == set(EVENTS.values())
    for event in every_event():
        names = [field.name for field in dataclasses.fields(event)]
        assert list(to_json(event)) == ["event", *names]


def test_round_trip_of_every_event() -> None:
    for event in every_event():
        read = again(event)
        assert same(read, event)
        assert canonical(to_json(read)) == canonical(to_json(event))
    loss: Any = again(every_event()[2])
    assert not loss.loss.flags.writeable and loss.loss.dtype == np.float64


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1.0, exclude_min=True, allow_infinity=False),
    st.floats(0.0, allow_nan=False),
    st.integers(0, 2**64),
    st.booleans(),
    st.none() | st.integers(1, 2**40),
)
def test_bounds_at_random(
    order: float, epsilon: float, queries: int, published: bool, budget: int | None
) -> None:
    event = RenyiBound(order, epsilon, 3, queries, published, budget)
    assert same(again(event), event)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"events":{}}', '{"events":[],"more":1}', '{"binding":{}}', '{"binding":null}',
     '{"binding":{},"events":[]}'],
)  # fmt: skip
def test_a_record_is_a_binding_or_a_list_of_events(text: str) -> None:
    with pytest.raises(LedgerCorruptError, match="record 7 could not be read"):
        Record(7, text, bytes(32)).entry()


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.float64, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)))
def test_arrays_keep_every_bit(values: Any) -> None:
    assert same(read_array(json.loads(canonical(write_array(values)))), values)
