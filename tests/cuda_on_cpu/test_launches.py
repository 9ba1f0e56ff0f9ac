"""What a query queues: few kernels and memsets, and no kernel of torch, which only allocates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import cases
import pytest
import simulated
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workload import Source

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
