"""Reads of memory that nothing wrote: each planted one is reported, with its place."""

from __future__ import annotations

import pytest
import simulated
import torch

FAULTS = {
    "workspace": "8 bytes, and nothing wrote byte 8 of the workspace",
    "dynamic": "8 bytes, and nothing wrote byte 8 of dynamic shared memory",
    "static": r"8 bytes, and nothing wrote byte \d+ of static shared memory",
    "atomic": r"4 bytes, and nothing wrote byte \d+ of static shared memory",
    "copy": r"8 bytes, and nothing wrote byte \d+ of static shared memory",
}


def read(where: str) -> float:
    built = simulated.module()
    if not built.sees_unwritten:
        pytest.skip("the kernels were not compiled by g++")
    workspace = torch.zeros(2, dtype=torch.float64)
    built.declare_unwritten(workspace.data_ptr(), 16)
    built.read_unwritten(where, workspace.data_ptr())
    return float(workspace[0])


@pytest.mark.parametrize("where", FAULTS)
def test_a_read_of_unwritten_memory_is_an_error(where: str) -> None:
    with pytest.raises(RuntimeError, match=f"reads {FAULTS[where]}") as caught:
        read(where)
    if simulated.has_addr2line():
        assert "planted.cpp:" in str(caught.value)


def test_a_kernel_that_writes_first_runs() -> None:
    assert read("nothing") == 0.0


def test_each_block_begins_with_unwritten_shared_memory() -> None:
    assert read("nothing") == 0.0
    with pytest.raises(RuntimeError, match="static shared memory"):
        read("static")
