"""Fixtures of the kernel tests, which run on each device that the build and the machine have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from workload import ISAS

import adapmixed_ext
from adapmixed_ext import _C

GPU = adapmixed_ext.build_info()["cuda"] and torch.cuda.is_available()


@pytest.fixture
def one_thread() -> None:
    """Override the suite's fixture of one thread: operators use all threads here."""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore what a test may have set for the whole process."""
    threads, isa = torch.get_num_threads(), _C.instruction_set()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    _C.use_instruction_set(isa)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    """Select each instruction set of this machine in turn."""
    assert _C.use_instruction_set(request.param)
    return str(request.param)


@pytest.fixture(params=["cpu", "cuda"] if GPU else ["cpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=[*ISAS, "cuda"] if GPU else ISAS)
def path(request: pytest.FixtureRequest) -> torch.device:
    """Return the device of each way to compute: the CPU with each instruction set, and a GPU."""
    if request.param == "cuda":
        return torch.device("cuda")
    assert _C.use_instruction_set(request.param)
    return torch.device("cpu")
