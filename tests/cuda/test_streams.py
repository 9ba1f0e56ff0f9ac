"""Repeated runs, streams and devices give the same bits, and no call waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import plans
import pytest
import torch
import workload


@contextmanager
def synchronisation_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", plans.DTYPES)
@pytest.mark.parametrize("shape", [(5, 3, 1003), (2, 1, 20_001), (130, 2, 300)])
def test_the_same_bits_again_and_on_another_stream(
    shape: tuple[int, int, int], dtype: torch.dtype, gpu: torch.device
) -> None:
    x = workload.make(6, *shape, dtype=dtype).to(gpu)
    stream = torch.cuda.Stream()
    for name, operation in workload.OPERATIONS.items():
        first = operation(x)
        for _ in range(3):
            assert workload.same(operation(x), first), name
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            elsewhere = operation(x)
        stream.synchronize()
        assert workload.same(elsewhere, first), name


def test_threads_with_different_needs_of_shared_memory(gpu: torch.device) -> None:
    """The shared memory that one call asks for is not taken from another call."""
    inputs = [workload.make(11, *shape).to(gpu) for shape in ((28, 1, 600), (60, 1, 20_000))]
    expected = [workload.OPERATIONS["leave_one_out"](x) for x in inputs]

    def repeat(k: int) -> bool:
        answers = [workload.OPERATIONS["leave_one_out"](inputs[k]) for _ in range(300)]
        return all(workload.same(answer, expected[k]) for answer in answers)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(repeat, (0, 1, 0, 1)))


def test_two_streams_at_once(gpu: torch.device) -> None:
    """A workspace belongs to its stream: calls that run at the same time do not share one."""
    inputs = [workload.make(seed, 40, 4, 5_003).to(gpu) for seed in (7, 8)]
    expected = [workload.OPERATIONS["leave_one_out"](x) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    results: list[list[tuple]] = [[], []]
    for _ in range(10):
        for k, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[k].append(workload.OPERATIONS["leave_one_out"](inputs[k]))
    torch.cuda.synchronize()
    for k, answers in enumerate(results):
        assert all(workload.same(answer, expected[k]) for answer in answers)


@pytest.mark.parametrize("name", workload.NAMES)
def test_nothing_waits_for_the_gpu(name: str, gpu: torch.device) -> None:
    x = workload.make(9).to(gpu)
    expected = workload.run(name, x)
    torch.cuda.synchronize()
    with synchronisation_forbidden():
        got = workload.run(name, x)
    assert workload.same(got, expected)
    # Torch does not see everything: the calls must also return while the GPU is busy with this.
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second
    got = workload.run(name, x)
    assert not torch.cuda.current_stream().query()
    assert workload.same(got, expected)


def test_tensors_decide_about_the_device(gpu: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is only one GPU")
    other = torch.device("cuda", 1)
    x = workload.make(10)
    for name, operation in workload.OPERATIONS.items():
        expected = operation(x.to(gpu))
        got = operation(x.to(other))
        assert {tensor.device for tensor in got} == {other}
        assert torch.cuda.current_device() == gpu.index
        # Another model of GPU may give other bits.
        if torch.cuda.get_device_name(0) == torch.cuda.get_device_name(1):
            assert workload.same(got, expected), name
    assert workload.same(workload.draws(x.to(other), 2), workload.draws(x, 2))
