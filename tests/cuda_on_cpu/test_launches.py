"""What a query queues: few kernels and memsets, and none of torch; workspaces; bad rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import bad_rows
import delete_barriers
import plans
import pytest
import simulated
import torch
from plans import INF, Source
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adapmixed_ext
from adapmixed_ext import _native


class Torch(TorchDispatchMode):
    """Counts the operators of torch that ours call."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "adapmixed":
            with self:
                return _native.implementations[func.overloadpacket.__name__](*args)
        self.called[str(func)] += 1
        return func(*args, **(kwargs or {}))


SOURCE = Source(1)


def pool(private: Tensor, public: Tensor) -> None:
    pooling = adapmixed_ext.log_pool(private, public, lower=-0.25, upper=1.0, scale=2.0)
    adapmixed_ext.sample(adapmixed_ext.mixture(private, public, pooling), public, rng=SOURCE)


def losses(private: Tensor, public: Tensor) -> None:
    projection = adapmixed_ext.project(private, public, order=18, radius=3.6)
    adapmixed_ext.leave_one_out(private, public, projection, orders=[18.0])


@pytest.mark.parametrize("call,kernels,memsets", [(pool, 3, 1), (losses, 5, 0)])
def test_a_query(call: Callable[[Tensor, Tensor], None], kernels: int, memsets: int) -> None:
    """The numbers include kernels that return at once, and may only go down.

    torch makes the pool's probabilities with two more.
    """
    private, public = plans.logits(9, 5, 2, 90, 2.0, 0.5)
    built = simulated.module()
    with simulated.kernels(sizes_of_a_gpu=True) as workspaces, Torch() as torchs:
        before = built.launches(), built.memsets()
        call(private, public)
        counts = built.launches() - before[0], built.memsets() - before[1]
    assert counts == (kernels, memsets)
    assert torchs.called.pop("aten.fill_.Scalar") == len(workspaces)  # the simulation fills them
    assert set(torchs.called) <= {
        "aten.new_empty.default", "aten.empty_like.default", "aten.unsqueeze.default",
        "aten.sub.Tensor", "aten.exp.default",
    }  # fmt: skip


def most(models: int, positions: int, orders: int) -> int:
    """Return the most bytes that ``adapmixed_ext`` states for ``leave_one_out`` on CUDA."""
    in_double = 8 * (models * (2 * orders + 1) + 1)
    in_floats = 8 * models * (36 * orders + 41)
    sharing = min(positions, max(1, 2**26 // max(in_double, in_floats)))
    return max(2**26, in_double) + sharing * (in_floats + 33 * models + 640) + 128


@pytest.mark.parametrize("orders", [1, 8])
@pytest.mark.parametrize("vocab", [2, 129, 50_257, 2**20])
@pytest.mark.parametrize("models", [1, 3, 100, 701, 702, 65_536])
def test_the_workspace_is_as_large_as_stated(models: int, vocab: int, orders: int) -> None:
    with simulated.kernels(sizes_of_a_gpu=True):
        built = simulated.module()
        for positions in (1, 8, 64, 100_000, 1_000_000):
            shape = models, positions, vocab
            size = built.leave_one_out_workspace(shape, orders)
            assert size <= most(models, positions, orders), shape
            first = built.project_workspace(shape)
            parts = -(-vocab // 2048)  # 64 groups of 32 tokens each
            assert first == positions * (1 + models) * parts * (32 + 4 * 64), shape
            assert built.log_sum_exp_workspace(shape) == positions * models * parts * 32, shape


# Kernels that cannot be queued: none built, no GPU, too large.


def test_a_build_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_native.backends, "cpu")
    with pytest.raises(RuntimeError, match="without kernels for cpu"):
        _native.call("project", torch.zeros(1))
    monkeypatch.delitem(_native.backends, "cuda", raising=False)
    with pytest.raises(RuntimeError, match="without kernels for cuda:1"):
        adapmixed_ext.gaussian(3, sigma=1.0, rng=Source(1), device="cuda:1")


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


def test_there_are_barriers_to_delete() -> None:
    """Of delete_barriers.py, which is run by hand."""
    mutants = list(delete_barriers.mutants())
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 10
    files = {m.file.relative_to("csrc").as_posix() for m in mutants}
    assert {"common/block.cuh", "leave_one_out/cuda_tile.cuh", "sample/cuda.cu"} <= files
    for mutant in mutants:
        before = (delete_barriers.ROOT / mutant.file).read_text().splitlines()
        after = mutant.text.splitlines()
        differ = [k + 1 for k, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert differ == [mutant.line], mutant.name


# Bad data.


@pytest.mark.parametrize("kind", bad_rows.BAD)
def test_bad_rows_are_reported_and_say_nothing(kind: str) -> None:
    private, public = bad_rows.bad(kind)
    error = bad_rows.raised(private, public)
    with simulated.kernels("reverse"):
        bad_rows.check_bad_rows(private, public, error)
        bad_rows.run_on_changed_rows(private, public)


def test_the_faults_of_a_row_in_any_part() -> None:
    """A NaN comes before +inf, wherever both are; the other rows are as ever."""
    private, public = plans.logits(7, 5, 1, 1100, 1.0, 0.5)
    good = private.clone()
    private[0, 0, 3], private[0, 0, 1090] = INF, math.nan
    private[1, 0, 10], private[1, 0, 11] = math.nan, INF
    private[2, 0, 1050] = INF
    private[3, 0] = -INF
    box = {"lower": -0.25, "upper": 1.0, "scale": 2.0}
    with simulated.kernels("reverse"):
        pool = adapmixed_ext.log_pool(private, public, **box)
        clean = adapmixed_ext.log_pool(good, public, **box)
        result = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    assert pool.status.flatten().tolist() == result.status.flatten().tolist() == [1, 1, 2, 3, 0]
    assert pool.log_normaliser.isnan().all() and pool.span[:4].isnan().all()
    assert pool.span[4] == clean.span[4] and pool.private_lse[4] == clean.private_lse[4]


def test_what_no_status_reports() -> None:
    with simulated.kernels():
        bad_rows.check_what_no_status_reports(torch.device("cpu"))
