"""Errors for kernels that cannot be queued: none built, no GPU, too large."""

from __future__ import annotations

import pytest
import simulated
import torch

from adapmixed_ext import _registry


def test_a_build_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_registry.backends, "cuda", raising=False)
    with pytest.raises(RuntimeError, match="without kernels for cuda:1"):
        _registry.backend(torch.device("cuda:1"))


def test_errors_of_the_runtime() -> None:
    for error in ("NoDevice", "NoKernelImageForDevice", "Unknown"):
        with pytest.raises(RuntimeError):
            simulated.module().check(f"cudaError{error}")
    simulated.module().check("cudaSuccess")


def test_more_blocks_than_a_gpu_takes_are_refused() -> None:
    """The error comes before any memory is accessed."""
    logits, shape, nowhere = (0, 0, 1, 0), (1, 2**31, 1), (0, 0, 0)
    with pytest.raises(ValueError, match="2147483648"):
        simulated.module().log_sum_exp(logits, *shape, 0, 0, nowhere)


def test_shared_memory_beyond_what_a_kernel_may_have_is_refused() -> None:
    """Dynamic and static memory may reach 48 KiB unasked, and 227 KiB if the kernel asks."""
    launch, static = simulated.module().launch_idle, 4096
    launch(48 * 1024 - static, False)
    with pytest.raises(RuntimeError):
        launch(48 * 1024 - static + 1, False)
    most = 227 * 1024 - static
    launch(most, True)
    with pytest.raises(RuntimeError):
        launch(most + 1, True)
