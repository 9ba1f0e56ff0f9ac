"""Fixtures of what only a GPU can test: streams, graphs, large sizes, agreement with the CPU.

The accuracy tests of tests/kernels also run on a GPU, through their `device` fixture. Without a
GPU, only test_without_gpu.py is collected here. It needs a build with CUDA and no driver.
"""

from __future__ import annotations

import pytest
import torch

import adapmixed_ext

if not (adapmixed_ext.build_info()["cuda"] and torch.cuda.is_available()):
    collect_ignore_glob = ["test_[!w]*.py"]


@pytest.fixture
def one_thread() -> None:
    """Override the suite's fixture of one thread: operators use all threads here."""


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    return torch.device("cuda", 0)
