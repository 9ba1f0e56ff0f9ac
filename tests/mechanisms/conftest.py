"""One thread, so that runs compare bit by bit; the tiny models of the driver's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

DRIVER = str(Path(__file__).resolve().parents[1] / "driver")
if DRIVER not in sys.path:
    sys.path.append(DRIVER)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
