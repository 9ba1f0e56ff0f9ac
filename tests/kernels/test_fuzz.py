"""A fixed number of fuzzed calls; `python tests/kernels/fuzz.py` runs any number."""

from __future__ import annotations

import fuzz
import fuzz_cases
import pytest
from checks import Report


def check(seeds: range) -> None:
    total = Report()
    for seed in seeds:
        total.add(fuzz.run(fuzz_cases.build(seed)))
    assert total.values > 200
    assert not total.failures, "\n".join(total.failures[:5])


def test_a_few_calls() -> None:
    check(range(25))


@pytest.mark.parametrize("batch", range(1, 11))
@pytest.mark.slow
def test_fuzzed_calls(batch: int) -> None:
    check(range(60 * batch, 60 * batch + 60))


def test_every_kind_and_path_occurs() -> None:
    calls = [fuzz_cases.build(seed) for seed in range(660)]
    assert {call.kind for call in calls} == set(fuzz_cases.KINDS)
    assert len({call.private.dtype for call in calls}) == 3
    assert {call.threads for call in calls} == {1, 2}
    assert {call.isa for call in calls} >= {"scalar"}
    assert any(call.private.shape[2] > 4000 for call in calls)
