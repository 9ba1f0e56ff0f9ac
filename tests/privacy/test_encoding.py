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
from adapmixed.privacy import Event, LeaveOneOutLoss, PublicAnswer, RenyiBound
from adapmixed.privacy.account import Binding
from adapmixed.privacy.encoding import canonical, parse, read_array, write_array
from adapmixed.privacy.events_json import _EVENTS, read_event, write_event
from adapmixed.privacy.ledger.records import Record


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
    return read_event(parse(canonical(write_event(event))))


def test_every_event_of_the_accountant_is_known_with_all_its_fields() -> None:
    assert set(_EVENTS.values()) == set(typing.get_args(Event))
    assert {type(event) for event in every_event()} == set(_EVENTS.values())
    for event in every_event():
        names = [field.name for field in dataclasses.fields(event)]
        assert list(write_event(event)) == ["event", *names]


def test_round_trip_of_every_event() -> None:
    for event in every_event():
        read = again(event)
        assert same(read, event)
        assert canonical(write_event(read)) == canonical(write_event(event))
    loss: Any = again(every_event()[2])
    assert not loss.loss.flags.writeable and loss.loss.dtype == np.float64


@pytest.mark.parametrize("count", [0, 1, len(every_event())])
def test_records_give_back_their_entries(count: int) -> None:
    events = every_event()[:count]
    record = Record.make(3, bytes(32), {"events": events})
    assert record.text.isascii() and record.follows(bytes(32))
    assert not record.follows(bytes(31) + b"\1")
    assert not dataclasses.replace(record, sequence=4).follows(bytes(32))
    assert all(map(same, record.entry()["events"], events))
    assert len(record.entry()["events"]) == count
    binding = Binding("a 'mechanism'", 3, "zcdp", None, 0.25, None)
    written = Record.make(1, bytes(32), {"binding": dataclasses.asdict(binding)})
    assert written.entry() == {"binding": binding}


losses_at_random = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=4),
    elements=st.floats(0.0, allow_nan=False, allow_infinity=True),
)


@settings(max_examples=100, deadline=None)
@given(losses_at_random, st.floats(0.0, 1.0), st.sampled_from(["zero_out", "add_remove"]))
def test_losses_at_random(loss: Any, error: float, adjacency: str) -> None:
    event = LeaveOneOutLoss(tuple(2.0 + k for k in range(loss.shape[2])), loss, adjacency, error)
    assert same(again(event), event)


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


def test_an_event_that_is_not_registered_is_not_written() -> None:
    @dataclasses.dataclass(frozen=True)
    class Answer(PublicAnswer):
        pass

    for event in (Answer(1), "PublicAnswer"):
        with pytest.raises(ValueError, match="events must be privacy events, got"):
            write_event(event)  # type: ignore[arg-type]


def array(shape: list[Any], content: bytes = bytes(8)) -> dict[str, Any]:
    return {**write_array(np.frombuffer(content)), "shape": shape}


def loss(written: Any) -> dict[str, Any]:
    return {
        "event": "LeaveOneOutLoss", "orders": [2.0], "loss": written,
        "adjacency": "zero_out", "loss_error": 0.0,
    }  # fmt: skip


def bound(**changes: Any) -> str:
    fields = {"order": "2.0", "epsilon": "0.5", "num_models": "1", "queries": "1",
              "published": "false", "budget": "null", **changes}  # fmt: skip
    listed = ",".join(f'"{name}":{value}' for name, value in fields.items())
    return '{"event":"RenyiBound",' + listed + "}"


NAN = np.array([np.nan]).tobytes()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"event":"Gift","queries":1}', "event must be one of .*, got 'Gift'"),
        ('{"event":["Gift"],"queries":1}', "event must be one of"),
        ('{"queries":1}', "event must be one of .*, got None"),
        ('{"event":"PublicAnswer"}', "must have the fields queries"),
        ('{"event":"PublicAnswer","queries":1,"free":2}', "must have the fields"),
        ('{"event":"PublicAnswer","queries":1.0}', "queries must be int, got 1.0"),
        ('{"event":"PublicAnswer","queries":true}', "queries must be int, got True"),
        ('{"event":"PublicAnswer","queries":-1}', "queries must be an integer >= 0"),
        ("1", "must be dict"),
        ("[", "could not be read"),
        ("[" * 100000, "could not be read"),
        (bound(order="2"), "order must be float, got 2"),
        (bound(order="NaN"), "numbers must be finite, got NaN"),
        (bound(order="Infinity"), "numbers must be finite, got Infinity"),
        (bound(order="1e999"), "order must be a float64, got inf"),
        (bound(order="0.5"), "order must be > 1, got 0.5"),
        (bound(published="0"), "published must be bool, got 0"),
        (bound(num_models='"1"'), "num_models must be int, got '1'"),
        (canonical(loss(array([1, 1, 1], b""))), "must hold .* numbers, got 0 bytes"),
        (canonical(loss(array([1, 1, 1], bytes(16)))), "must hold .* numbers, got 16 bytes"),
        (canonical(loss(array([1, 1]))), "loss must have shape"),
        (canonical(loss(array([-1, -1, 1]))), "must hold .* numbers"),
        (canonical(loss(array([True, 1, 1]))), "must be int"),
        (canonical(loss(array([10**6, 10**6, 10**6]))), "must hold .* numbers"),
        (canonical(loss(array([1, 1, 1], NAN))), "loss must be >= 0"),
        (canonical(loss({"shape": [1, 1, 1], "data": "AAAAAAAAAAA"})), "could not be read"),
        (canonical(loss({"shape": [1, 1, 1], "data": "AAAAAAAAA\nAA="})), "could not be read"),
        (canonical(loss({"shape": [1, 1, 1], "data": "AAAAAAAAAAA=", "more": 1})), "shape and da"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, words: str) -> None:
    record = Record(7, '{"events":[' + text + "]}", bytes(32))
    with pytest.raises(LedgerCorruptError, match="record 7 could not be read: ") as refused:
        record.entry()
    assert isinstance(refused.value, ValueError)
    if words != "could not be read":
        with pytest.raises(LedgerCorruptError, match=words):
            record.entry()


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
