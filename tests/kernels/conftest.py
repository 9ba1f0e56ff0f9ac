"""Fixtures of the kernel tests, which run on each device that the build and the machine have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adapmixed_ext import _C


@pytest.fixture
def one_thread() -> None:
    """Override the suite's fixture of one thread: operators use all threads here."""


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda":
        import adapmixed_ext

        if not adapmixed_ext.build_info()["cuda"]:
            pytest.skip("adapmixed_ext was built without CUDA")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device is reachable")
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Restore what a test may have set for the whole process."""
    threads, isa = torch.get_num_threads(), _C.instruction_set()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    _C.use_instruction_set(isa)


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> str:
    """Select each instruction set of this machine in turn."""
    if not _C.use_instruction_set(request.param):
        pytest.skip(f"{request.param} is not available here")
    return str(request.param)
