"""The kernels with the tiles and chunks of a GPU, their layout and their workspaces."""

from __future__ import annotations

import math

import pytest
import simulated
import torch
from test_float_losses import check, ensemble

import adapmixed_ext


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.slow
def test_floats_in_tiles_of_a_gpu(adjacency: str) -> None:
    """Three tiles, the last one of 88 tokens instead of 256, with tokens in double."""
    private, public = ensemble(9, 600, shift=0.0, noise=0.9)
    private[..., 5::50] = public[..., 5::50] = -math.inf
    private[4, :, 300] += 9.0
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    options = {"orders": [2.0, 7.5], "adjacency": adjacency, "sizes_of_a_gpu": True}
    check(private, public, projection, **options)


@pytest.mark.parametrize("models", [2, 700])
@pytest.mark.slow
def test_few_and_many_models_in_tiles_of_a_gpu(models: int) -> None:
    """Two models are computed in double; 700 take tiles of 32 tokens, and two groups."""
    private, public = ensemble(models, 300 if models == 2 else 40, shift=0.0, noise=0.5)
    weight = torch.full(private.shape[:2], 0.25, dtype=torch.float64)
    check(private, public, weight, orders=[3.0], sizes_of_a_gpu=True)


def test_shared_memory_just_below_48_kib() -> None:
    """With the kernels' static memory this exceeds the limit for a kernel that has not asked.

    N = 85 takes 48 800 bytes.
    """
    private, public = ensemble(85, 150, shift=0.0, noise=0.5)
    weight = torch.full(private.shape[:2], 0.25, dtype=torch.float64)
    check(private, public, weight, orders=[3.0], sizes_of_a_gpu=True)


def most(models: int, positions: int, orders: int) -> int:
    """Return the most bytes that ``adapmixed_ext`` states for ``leave_one_out`` on CUDA."""
    in_double = 8 * (models * (2 * orders + 1) + 1)
    in_floats = 8 * models * (36 * orders + 41)
    sharing = min(positions, max(1, 2**26 // max(in_double, in_floats)))
    return max(2**26, in_double) + sharing * (in_floats + 33 * models + 640) + 128


@pytest.mark.parametrize("orders", [1, 8, 32])
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
