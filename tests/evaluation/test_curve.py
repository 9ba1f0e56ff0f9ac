"""A curve keeps evenly spaced points in bounded memory."""

from __future__ import annotations

import pytest

from adapmixed.evaluation.curve import Curve
from adapmixed.evaluation.tally import CURVE_POINTS


@pytest.mark.parametrize("calls", [1, 2, 511, 512, 513, 1024, 1025, 1536, 5000])
def test_a_curve_keeps_evenly_spaced_points_and_the_last(calls: int) -> None:
    curve = Curve(CURVE_POINTS)
    for call in range(1, calls + 1):
        curve.add((call, float(call), 1.0))
    kept = [int(call) for call in curve.all()[:, 0]]
    step = kept[0]
    assert kept == [*range(step, calls + 1, step)] + ([calls] if calls % step else [])
    assert len(kept) <= CURVE_POINTS + 1
    assert step == 1 if calls <= CURVE_POINTS else len(kept) > CURVE_POINTS // 2
