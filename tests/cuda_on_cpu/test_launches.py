"""What a query queues: few kernels and memsets, and none of torch; the sizes of workspaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import cases
import pytest
import simulated
import torch
from cases import Source
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import adapmixed_ext
from adapmixed_ext import _leave_one_out, _log_pool, _project, _sample


class Torch(TorchDispatchMode):
    """Counts the operators of torch that ours call."""

    OURS: dict[Any, Callable[..., Any]] = {
        torch.ops.adapmixed.log_pool.default: _log_pool._log_pool,
        torch.ops.adapmixed.sample.default: _sample._sample,
        torch.ops.adapmixed.project.default: _project._project,
        torch.ops.adapmixed.leave_one_out.default: _leave_one_out._leave_one_out,
    }

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in self.OURS:
            with self:
                return self.OURS[func](*args)
        self.called[str(func)] += 1
        return func(*args, **(kwargs or {}))


SOURCE = Source(1)


def pool(private: Tensor, public: Tensor) -> None:
    found = adapmixed_ext.log_pool(private, public, lower=-0.25, upper=1.0, scale=2.0)
    adapmixed_ext.sample(adapmixed_ext.mixture(private, public, found), public, rng=SOURCE)


def losses(private: Tensor, public: Tensor) -> None:
    projection = adapmixed_ext.project(private, public, order=18, radius=3.6)
    adapmixed_ext.leave_one_out(private, public, projection, orders=[18.0])


@pytest.mark.parametrize("call,kernels,memsets", [(pool, 3, 1), (losses, 5, 0)])
def test_a_query(call: Callable[[Tensor, Tensor], None], kernels: int, memsets: int) -> None:
    """The numbers include kernels that return at once, and may only go down.

    torch makes the pool's probabilities with two more.
    """
    private, public = cases.logits(9, 5, 2, 90, 2.0, 0.5)
    built = simulated.module()
    with simulated.kernels(sizes_of_a_gpu=True) as workspaces, Torch() as torchs:
        before = built.launches(), built.memsets()
        call(private, public)
        found = built.launches() - before[0], built.memsets() - before[1]
    assert found == (kernels, memsets)
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
