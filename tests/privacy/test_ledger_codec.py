"""Events survive writing and reading in every bit; what is not understood is refused."""

from __future__ import annotations

import dataclasses
import json
import typing
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from ledger_cases import every_event

from adapmixed.privacy import Event, LeaveOneOutLoss, LedgerError, PublicAnswer, RenyiBound
from adapmixed.privacy.ledger.codec import FIELDS, decode, encode, readable


def same(one: Any, other: Any) -> bool:
    """Equal in type and in bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.shape == other.shape and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return repr(one) == repr(other)


def test_every_event_of_the_accountant_is_known_with_all_its_fields() -> None:
    assert set(FIELDS) == set(typing.get_args(Event))
    for kind, fields in FIELDS.items():
        assert list(fields) == [field.name for field in dataclasses.fields(kind)]
    assert {type(event) for event in every_event()} == set(FIELDS)


def test_round_trip_of_every_event() -> None:
    events = every_event()
    for group in ([], *([event] for event in events), events):
        written = encode(group)
        read = decode(*written)
        assert len(read) == len(group) and all(map(same, group, read))
        assert encode(read) == written
    loss = decode(*encode(events))[2].loss
    assert not loss.flags.writeable and loss.flags.c_contiguous and loss.dtype == np.float64


losses_at_random = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=3, max_dims=3, min_side=1, max_side=4),
    elements=st.floats(0.0, allow_nan=False, allow_infinity=True),
)


@settings(max_examples=100, deadline=None)
@given(losses_at_random, st.floats(0.0, 1.0), st.sampled_from(["zero_out", "add_remove"]))
def test_losses_at_random(loss: Any, error: float, adjacency: str) -> None:
    event = LeaveOneOutLoss(tuple(2.0 + k for k in range(loss.shape[2])), loss, adjacency, error)
    assert same(decode(*encode([event]))[0], event)


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
    event = RenyiBound(order, epsilon, 3, queries, "zero_out", published, budget)
    assert same(decode(*encode([event]))[0], event)


def test_readable_shows_every_value() -> None:
    text = json.dumps([readable(event) for event in every_event()], allow_nan=False)
    shown = json.loads(text)
    assert [event["event"] for event in shown] == [type(e).__name__ for e in every_event()]
    assert shown[2]["loss"] == [
        [[0.0, -0.0], [5e-324, 1 / 3]],
        [[float(np.finfo(float).max), "inf"], [1e-12, 0.1]],
    ]
    assert shown[6]["epsilon"] == "inf" and shown[6]["budget"] is None


def test_an_event_that_is_not_registered_is_not_written() -> None:
    @dataclasses.dataclass(frozen=True)
    class Answer(PublicAnswer):
        pass

    with pytest.raises(ValueError, match="a class that the ledger knows .*, got Answer"):
        encode([Answer(1)])
    with pytest.raises(ValueError, match="got str"):
        encode(["PublicAnswer"])  # type: ignore[list-item]


NOTHING = zlib.compress(b"")
LOSS = '[{"event":"LeaveOneOutLoss","orders":[2.0],"loss":%s,"adjacency":"zero_out",'
LOSS += '"loss_error":0.0}]'
BOUND = '[{"event":"RenyiBound","order":%s,"epsilon":0.5,"num_models":%s,"queries":1,'
BOUND += '"adjacency":"zero_out","published":%s,"budget":null}]'


@pytest.mark.parametrize(
    ("text", "blob", "words"),
    [
        ('[{"event":"Gift","queries":1}]', NOTHING, "event must be one .* knows .*, got 'Gift'"),
        ('[{"queries":1}]', NOTHING, "event must be one .*, got None"),
        ('[{"event":"PublicAnswer"}]', NOTHING, "PublicAnswer must have the fields queries"),
        ('[{"event":"PublicAnswer","queries":1,"free":2}]', NOTHING, "must have the fields"),
        ('[{"event":"PublicAnswer","queries":1.0}]', NOTHING, "queries must be int, got 1.0"),
        ('[{"event":"PublicAnswer","queries":true}]', NOTHING, "queries must be int, got True"),
        ('[{"event":"PublicAnswer","queries":-1}]', NOTHING, "queries must be an integer >= 0"),
        ('{"event":"PublicAnswer","queries":1}', NOTHING, "must be list"),
        ("[1]", NOTHING, "must be dict"),
        ("[", NOTHING, "could not be read"),
        ("[" * 100000, NOTHING, "could not be read"),
        (BOUND % ("2", 1, "false"), NOTHING, "order must be float, got 2"),
        (BOUND % ("NaN", 1, "false"), NOTHING, "NaN is no number"),
        (BOUND % ("Infinity", 1, "false"), NOTHING, "Infinity is no number"),
        (BOUND % ("1e999", 1, "false"), NOTHING, "order must be a float64, got inf"),
        (BOUND % ("0.5", 1, "false"), NOTHING, "order must be > 1, got 0.5"),
        (BOUND % ("2.0", 1, "0"), NOTHING, "published must be bool, got 0"),
        (BOUND % ("2.0", '"1"', "false"), NOTHING, "num_models must be int, got '1'"),
        (LOSS % "[1,1,1]", NOTHING, "needs 8 bytes of charges, there are 0"),
        (LOSS % "[1,1,1]", zlib.compress(bytes(16)), "must unpack to 8 bytes"),
        (LOSS % "[1,1,1]", zlib.compress(bytes(8)) + b"x", "must unpack to 8 bytes"),
        (LOSS % "[1,1,1]", zlib.compress(bytes(8))[:-1], "must unpack to 8 bytes"),
        (LOSS % "[1,1,1]", b"nonsense", "could not be read"),
        (LOSS % "[1,1]", zlib.compress(bytes(8)), "loss must have shape"),
        (LOSS % "[-1,1,1]", NOTHING, "must be a shape"),
        (LOSS % "[true,1,1]", zlib.compress(bytes(8)), "must be int"),
        (LOSS % "[1000000,1000000,1000000]", NOTHING, "cannot belong to one record"),
        (LOSS % "[1,1,1]", zlib.compress(np.array([np.nan]).tobytes()), "loss must be >= 0"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, blob: bytes, words: str) -> None:
    with pytest.raises(LedgerError, match=words) as refused:
        decode(text, blob)
    assert isinstance(refused.value, ValueError)
