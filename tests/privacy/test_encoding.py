"""Numbers and arrays of an event survive writing and reading in every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from adapmixed.privacy import LeaveOneOutLoss, RenyiBound
from adapmixed.privacy.encoding import canonical, parse, read_event, to_json

ARRAYS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 3), st.integers(0, 3), st.just(1)),
    elements=st.floats(0.0, allow_nan=False),
)


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1.0, exclude_min=True, allow_infinity=False),
    st.floats(0.0, allow_nan=False),
    st.integers(0, 2**64),
    st.booleans(),
    st.none() | st.integers(1, 2**40),
    ARRAYS,
)
def test_events_at_random(
    order: float, epsilon: float, queries: int, published: bool, budget: int | None, loss: Any
) -> None:
    bound = RenyiBound(order, epsilon, 3, queries, published, budget)
    for array in (loss, np.asfortranarray(loss)):
        event = LeaveOneOutLoss((order,), array, "zero_out")
        for one in (bound, event):
            found = read_event(parse(canonical(to_json(one))))
            assert repr(found) == repr(one)
        assert found.loss.tobytes() == loss.tobytes() and found.loss.dtype == np.float64
        assert not found.loss.flags.writeable
