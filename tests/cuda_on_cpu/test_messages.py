"""Error messages for kernels that cannot be queued: none built, no GPU, another GPU, too large."""

from __future__ import annotations

import pytest
import simulated
import torch

from adapmixed_ext import _registry


def test_a_build_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_registry.backends, "cuda", raising=False)
    with pytest.raises(RuntimeError, match=r"built without kernels for cuda:1: move the tensors"):
        _registry.backend(torch.device("cuda:1"))


@pytest.mark.parametrize(
    "error,said",
    [
        ("cudaErrorInsufficientDriver", "found no GPU, or a driver older than"),
        ("cudaErrorNoDevice", "found no GPU, or a driver older than"),
        (
            "cudaErrorNoKernelImageForDevice",
            "not built for this GPU's architecture: build it with ADAPMIXED_CUDA_ARCHITECTURES",
        ),
        ("cudaErrorInvalidDeviceFunction", "not built for this GPU's architecture"),
        ("cudaErrorUnknown", "could not queue a kernel: cudaErrorUnknown"),
    ],
)
def test_errors_of_the_runtime(error: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        simulated.module().check(error)
    simulated.module().check("cudaSuccess")


@pytest.mark.parametrize("name", ["log_sum_exp", "mixture", "project", "sample", "screen"])
def test_more_blocks_than_a_gpu_takes_are_refused(name: str) -> None:
    """The error comes before any memory is accessed."""
    shape, logits, nowhere = (1, 2**31, 1), (0, 0, 1, 0), (0, 0, 0)
    key = torch.zeros(32, dtype=torch.uint8)
    weights = (0, 0, 0, 0.0, 0.0)
    arguments = {
        "log_sum_exp": (shape, logits, 0, 0),
        "mixture": (shape, logits, logits, 0, 0, weights, 0),
        "project": (shape, logits, logits, 18.0, 3.6, 0, 0, 0, 0, 0, 0),
        "sample": (0, logits, 2**31, 1, key.data_ptr(), 1, 0, 0),
        "screen": (shape, logits, logits, 0, 0, 0, 0, 0.1, 2.0, 1.0, 1, 1, 0, 0),
    }
    with pytest.raises(ValueError, match="this one would take 2147483648"):
        getattr(simulated.module(), name)(*arguments[name], nowhere)


def test_shared_memory_beyond_what_a_kernel_may_have_is_refused() -> None:
    """Dynamic and static memory may reach 48 KiB unasked, and 227 KiB if the kernel asks."""
    launch, static = simulated.module().launch_idle, 4096
    launch(48 * 1024 - static, False)
    with pytest.raises(RuntimeError, match="no GPU could run"):
        launch(48 * 1024 - static + 1, False)
    most = 227 * 1024 - static
    for size in (48 * 1024, most, 100):
        launch(size, True)
        # Never a limit for this launch alone: another thread's launch could change it in between.
        assert set(simulated.module().shared_limits()) == {most}
    with pytest.raises(
        RuntimeError, match=f"needs {most + 1} bytes of shared.* at most {most} bytes of it"
    ):
        launch(most + 1, True)
    launch(most, True)
