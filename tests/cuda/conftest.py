"""What only a GPU shows: streams, graphs, large sizes, and agreement with the CPU's operators.

The accuracy tests of tests/kernels run on a GPU too, through their `device` fixture. Without a GPU
everything here is skipped but test_workload.py, and test_without_gpu.py, which wants a build with
CUDA and no driver.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import adapmixed_ext

HERE = Path(__file__).resolve().parent
for folder in (HERE, HERE.parent / "kernels"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture
def one_thread() -> None:
    """Instead of the one that all other tests have: operators run with as many as there are."""


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The first GPU."""
    if not adapmixed_ext.build_info()["cuda"]:
        pytest.skip("adapmixed_ext was built without CUDA")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is reachable")
    return torch.device("cuda", 0)
