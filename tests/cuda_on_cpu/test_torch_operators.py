"""A projection and its losses queue no kernel of torch: torch allocates and does nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import cases
import pytest
import simulated
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import adapmixed_ext
from adapmixed_ext import _leave_one_out, _project


class Torch(TorchDispatchMode):
    """Counts the operators of torch that ours call."""

    OURS: dict[Any, Callable[..., Any]] = {
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
def test_torch_allocates_and_does_nothing_else(order: float, radius: float) -> None:
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
