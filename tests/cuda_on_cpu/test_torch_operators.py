"""Neither pipeline of a query queues a kernel of torch: torch allocates and does nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import cases
import pytest
import simulated
import torch
from fuzz import Source
from pools import SETTINGS
from torch.utils._python_dispatch import TorchDispatchMode

import adapmixed_ext
from adapmixed_ext import _leave_one_out, _log_pool, _project, _sample


class Torch(TorchDispatchMode):
    """Counts the operators of torch that ours call."""

    OURS: dict[Any, Callable[..., Any]] = {
        torch.ops.adapmixed.log_pool.default: _log_pool._log_pool,
        torch.ops.adapmixed.pool_mixture.default: _log_pool._pool_mixture,
        torch.ops.adapmixed.pool_probabilities.default: _log_pool._pool_probabilities,
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


@pytest.mark.parametrize("order,radius", [(18.0, 3.6), (3.0, 0.03), (2.5, 0.1)])
def test_a_projection_and_its_losses(order: float, radius: float) -> None:
    private, public = cases.logits(9, 4, 2, 300, 2.0, 0.7)
    with simulated.kernels() as workspaces, Torch() as torchs:
        projection = adapmixed_ext.project(private, public, order=order, radius=radius)
        own = dict(torchs.called)
        adapmixed_ext.leave_one_out(private, public, projection, orders=[order])
    # The simulation fills each workspace.
    assert torchs.called.pop("aten.fill_.Scalar") == len(workspaces)
    assert own.pop("aten.fill_.Scalar") == 1
    allocates = {"aten.new_empty.default", "aten.empty_like.default"}
    assert set(own) <= allocates and set(torchs.called) <= allocates


def test_a_pool_its_mixture_and_its_token() -> None:
    private, public = cases.logits(9, 4, 2, 300, 2.0, 0.7)
    source = Source(1)
    key = source.reserve()[0]
    source.reserve = lambda: (key, 2)  # type: ignore[method-assign]
    with simulated.kernels() as workspaces, Torch() as torchs:
        active = torch.ones(4, 2, dtype=torch.bool)
        pool = adapmixed_ext.log_pool(private, public, active=active, **SETTINGS[0].options(4))
        mixture = adapmixed_ext.mixture(private, public, pool)
        adapmixed_ext.sample(mixture, public, rng=source)
    # The simulation fills each workspace, and this test makes a mask.
    assert torchs.called.pop("aten.fill_.Scalar") == len(workspaces) == 2
    assert torchs.called.pop("aten.ones.default") == 1
    assert set(torchs.called) <= {"aten.new_empty.default", "aten.empty_like.default"}
