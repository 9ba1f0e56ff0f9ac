"""A client that sends anything: see fuzz_server.py."""

from __future__ import annotations

import pytest
from fuzz_server import SEED, fuzz


@pytest.mark.slow
def test_a_thousand_requests() -> None:
    found = fuzz(1000, SEED)
    counts = found.statuses
    assert counts[200] > 200 and counts[400] > 200 and counts[404] and counts[405] and counts[413]
    if found.files:
        assert found.files[0] == found.files[1]
