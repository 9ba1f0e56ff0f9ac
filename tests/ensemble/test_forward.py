"""--memory bounds the memory in use, measured as resident memory of a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("memory_cases.py")


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK),
    reason="the peak of the resident memory cannot be begun anew (/proc/self/clear_refs)",
)
@pytest.mark.slow
def test_what_decoding_holds_stays_within_memory_bytes() -> None:
    """oneDNN's own memory in bfloat16 depends on the processor and is not counted.

    So the test makes oneDNN use the same kernels on all processors.
    """
    environment = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2",
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, str(CASES)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == 2 * 15 + 1
    for case in found:
        # The bound is not far too large either.
        assert 0.5 * case["needed"] < case["held"] <= 1.15 * case["needed"], case
