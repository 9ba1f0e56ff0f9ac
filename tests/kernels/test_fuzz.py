"""A fixed number of fuzzed calls; `python tests/kernels/fuzz.py` runs any number."""

from __future__ import annotations

from collections import Counter

import fuzz
import fuzz_cases
import pytest
from checks import Report
from regressions import FUZZED

BATCHES, EACH = 10, 60


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.slow
def test_fuzzed_calls(batch: int) -> None:
    total = Report()
    for seed in range(batch * EACH, (batch + 1) * EACH):
        total.add(fuzz.run(fuzz_cases.build(seed)))
    assert total.values > 1000
    assert not total.failures, "\n".join(total.failures[:5])


@pytest.mark.parametrize("seed", FUZZED)
def test_what_once_failed(seed: int) -> None:
    report = fuzz.run(fuzz_cases.build(seed))
    assert not report.failures, "\n".join(report.failures[:5])


def test_every_kind_and_path_occurs() -> None:
    calls = [fuzz_cases.build(seed) for seed in range(BATCHES * EACH)]
    kinds = Counter(call.kind for call in calls)
    assert set(kinds) == set(fuzz_cases.KINDS)
    assert len({call.private.dtype for call in calls}) == 3
    assert {call.threads for call in calls} == {1, 2}
    assert {call.isa for call in calls} >= {"scalar"}
    assert any(call.private.shape[2] > 4000 for call in calls)
    assert any(call.private.stride(0) == 0 for call in calls if call.private.shape[0] > 1)
    assert any(call.private.storage_offset() > 0 for call in calls)
    assert any(not call.private.is_contiguous() for call in calls)
    assert all((call.expected is not None) == (call.kind == "bad") for call in calls)
