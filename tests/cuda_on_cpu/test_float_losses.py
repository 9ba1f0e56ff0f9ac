"""leave_one_out in single precision on the simulated GPU: inputs it serves, and those it leaves."""

from __future__ import annotations

import math

import pytest
import simulated
import torch
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Projection, reference

Ensemble = tuple[Tensor, Tensor]


def ensemble(models: int, vocab: int, *, shift: float, noise: float, seed: int = 0) -> Ensemble:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    public = 3 * normal(2, vocab)
    return public + shift * normal(2, vocab) + noise * normal(models, 2, vocab), public


def worst_error(
    private: Tensor,
    public: Tensor,
    projection: Projection | Tensor,
    *,
    sizes_of_a_gpu: bool = False,
    **options: object,
) -> float:
    """Return the relative error against the float64 reference.

    The losses must be the same in every order of threads.
    """
    exact = reference.leave_one_out(private, public, projection, **options)
    found = []
    for order in simulated.ORDERS:
        with simulated.kernels(*order, sizes_of_a_gpu=sizes_of_a_gpu):
            found.append(adapmixed_ext.leave_one_out(private, public, projection, **options))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    more = found[0] - exact
    assert torch.all((more >= 0) & (more <= 2e-5 * exact + 2e-12)), (found[0], exact)
    return float((((found[0] - 1e-12) / (1 + 1e-5) - exact).abs() / exact).max())


# Doubles, without what is added to a loss, agree with the reference to this; floats do not.
DOUBLE = 1e-11


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift,noise", [(0.0, 1.5), (1.5, 0.3)])
def test_floats_serve(shift: float, noise: float, dtype: torch.dtype, adjacency: str) -> None:
    """Floats serve models near the public one, far from it, and with a common shift.

    Far models have tokens beyond reach; a common shift needs deviations in double. Some tokens are
    masked, and rows do not fill a tile.
    """
    private, public = (t.to(dtype) for t in ensemble(33, 333, shift=shift, noise=noise))
    private[..., 5::50] = public[..., 5::50] = -math.inf
    private[3, 0, 7] = -math.inf
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    options = {"orders": [2.0, 3.0, 7.5, 32.0], "adjacency": adjacency}
    assert worst_error(private, public, projection, **options) > DOUBLE


def test_tokens_left_to_double_within_floats() -> None:
    """A canary of one model, a token that the mixture has nearly lost, and one with q = e^-65."""
    private, public = ensemble(20, 300, shift=0.0, noise=0.5)
    private[4, :, 30] += 9.0
    private[:, :, 40] -= 12.0
    public[:, 50], private[:, :, 50] = -60.0, -50.0
    weight = torch.full((20, 2), 0.9999, dtype=torch.float64)
    assert worst_error(private, public, weight, orders=[2.0, 8.0]) > DOUBLE


def test_losses_outside_the_bound_are_done_in_double() -> None:
    """Some likely tokens nearly reach the end of the interpolants, where errors count most."""
    private, public = ensemble(40, 256, shift=0.0, noise=0.5)
    private[..., 200:] += 2.0
    weight = torch.full((40, 2), 0.9, dtype=torch.float64)
    assert worst_error(private, public, weight, orders=[100.0]) < DOUBLE


def test_excesses_beyond_the_range_of_the_sums_are_done_in_double() -> None:
    """At this order the excess of a canary is e^700, more than the listed tokens' sums hold."""
    private, public = ensemble(8, 256, shift=0.0, noise=0.1)
    private[0, :, 3] += 12.0
    weight = torch.ones(8, 2, dtype=torch.float64)
    assert worst_error(private, public, weight, orders=[400.0]) < DOUBLE


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_more_listed_tokens_than_a_list_holds(adjacency: str) -> None:
    """Nearly all tokens of a tile are listed, each for many models: two lists, full queues."""
    private, public = ensemble(70, 200, shift=0.0, noise=2.0)
    weight = torch.full((70, 2), 0.7, dtype=torch.float64)
    options = {"orders": [2.0, 60.0, 7.5], "adjacency": adjacency}
    for sizes_of_a_gpu in (False, True):
        worst_error(private, public, weight, sizes_of_a_gpu=sizes_of_a_gpu, **options)


def test_slots_without_a_model() -> None:
    private, public = ensemble(12, 200, shift=0.5, noise=0.5)
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    assert worst_error(private, public, projection, orders=[3.0], num_models=50) > DOUBLE


def test_identical_models_lose_next_to_nothing() -> None:
    """Also at a token of the last tile, far beyond the reach of the interpolants for all models."""
    private, public = ensemble(1, 129, shift=1.0, noise=0.0)
    private[..., -1] += 8.0
    private = private.expand(9, 2, 129)
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    with simulated.kernels():
        loss = adapmixed_ext.leave_one_out(private, public, projection, orders=[3.0, 64.0])
    assert torch.all(loss <= 1e-12)


@pytest.mark.parametrize("token", [1, 100, 190])
def test_a_tile_refuses_floats_while_others_run(token: int) -> None:
    """A masked token that some model answers lies in one of three tiles.

    The threads of the other tiles find the flag raised halfway (scheduler.cpp) and must agree.
    """
    private, public = ensemble(8, 192, shift=0.0, noise=0.5)
    public[0, token] = -math.inf
    weight = torch.full((8, 2), 0.3, dtype=torch.float64)
    assert worst_error(private, public, weight, orders=[2.0, 3.0], adjacency="zero_out") < math.inf
