"""How many kernels and memsets a query queues. Each takes time, even without work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import simulated
import torch
from fuzz import Source
from test_float_losses import ensemble

import adapmixed_ext

Tensor = torch.Tensor


def pool(private: Tensor, public: Tensor) -> None:
    found = adapmixed_ext.log_pool(private, public, lower=-0.25, upper=1.0, scale=2.0)
    mixture = adapmixed_ext.mixture(private, public, found)
    adapmixed_ext.sample(mixture, public, rng=Source(1))


def losses(private: Tensor, public: Tensor) -> None:
    projection = adapmixed_ext.project(private, public, order=18, radius=3.6)
    adapmixed_ext.leave_one_out(private, public, projection, orders=[18.0])


CALLS: dict[str, tuple[Callable[[Tensor, Tensor], None], int, int]] = {  # kernels, memsets
    "log_pool + mixture + sample": (pool, 4, 1),
    "project + leave_one_out": (losses, 6, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_of_a_query(name: str) -> None:
    """The numbers include kernels that return at once, and may only go down."""
    call, kernels, memsets = CALLS[name]
    private, public = ensemble(5, 90, shift=0.0, noise=0.5)
    built = simulated.module()
    with simulated.kernels(sizes_of_a_gpu=True):
        before = built.launches(), built.memsets()
        call(private, public)
        found = built.launches() - before[0], built.memsets() - before[1]
    assert found == (kernels, memsets)
