"""leave_one_out on the simulated GPU: what is in single precision, in double, or listed."""

from __future__ import annotations

import contextlib
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


def check(
    private: Tensor,
    public: Tensor,
    projection: Projection | Tensor,
    *,
    sizes_of_a_gpu: bool = False,
    **options: object,
) -> Tensor:
    """Check losses against the float64 reference, in every order of threads."""
    exact = reference.leave_one_out(private, public, projection, **options)
    found = []
    for order in simulated.ORDERS:
        with simulated.kernels(*order, sizes_of_a_gpu=sizes_of_a_gpu):
            found.append(adapmixed_ext.leave_one_out(private, public, projection, **options))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    orders = torch.tensor(options["orders"])
    more, allowed = found[0] - exact, torch.where(orders <= 32, 1e-4, 2e-4) * exact + 1e-9
    assert torch.all((more >= 0) & (more <= allowed)), (found[0], exact)
    return found[0]


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift,noise", [(0.0, 1.5), (1.5, 0.3)])
def test_near_and_shared_models(
    shift: float, noise: float, dtype: torch.dtype, adjacency: str
) -> None:
    """Models near the public one, or with a common shift. Tokens are masked; a tile is not full."""
    private, public = (t.to(dtype) for t in ensemble(33, 333, shift=shift, noise=noise))
    private[..., 5::50] = public[..., 5::50] = -math.inf
    private[3, 0, 7] = -math.inf
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    options = {"orders": [2.0, 3.0, 7.5, 32.0], "adjacency": adjacency}
    check(private, public, projection, **options)


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_tokens_in_double(adjacency: str) -> None:
    """A canary of one model, a token that the mixture has nearly lost, and one with q = e^-65."""
    private, public = ensemble(20, 300, shift=0.0, noise=0.5)
    private[4, :, 30] += 9.0
    private[:, :, 40] -= 12.0
    public[:, 50], private[:, :, 50] = -60.0, -50.0
    weight = torch.full((20, 2), 0.9999, dtype=torch.float64)
    check(private, public, weight, orders=[2.0, 8.0], adjacency=adjacency)


def test_tokens_at_the_end_of_the_interpolants() -> None:
    """Errors count most there."""
    private, public = ensemble(40, 256, shift=0.0, noise=0.5)
    private[..., 200:] += 2.0
    check(private, public, torch.full((40, 2), 0.9, dtype=torch.float64), orders=[100.0])


@pytest.mark.parametrize("models", [8, 16])
def test_an_excess_beyond_the_range_of_floats(models: int) -> None:
    private, public = ensemble(models, 256, shift=0.0, noise=0.1)
    private[0, :, 3] += 4.5
    loss = check(private, public, torch.ones(models, 2, dtype=torch.float64), orders=[200.0])
    assert 150 < loss[0].max() * 199 < 600


def test_more_models_than_a_group() -> None:
    """Their rows are read twice, and the sums of 48 at a time lie in shared memory."""
    private, public = ensemble(100, 150, shift=0.3, noise=1.0)
    private[70, :, 3] += 8.0
    check(private, public, torch.full((100, 2), 0.8, dtype=torch.float64), orders=[2.0, 30.0])


@pytest.mark.parametrize("adjacency", ["add_remove", "zero_out"])
def test_many_listed_tokens(adjacency: str) -> None:
    """Nearly all tokens of a tile are listed, each for many models."""
    private, public = ensemble(70, 200, shift=0.0, noise=2.0)
    weight = torch.full((70, 2), 0.7, dtype=torch.float64)
    options = {"orders": [2.0, 60.0, 7.5], "adjacency": adjacency}
    for sizes_of_a_gpu in (False, True):
        check(private, public, weight, sizes_of_a_gpu=sizes_of_a_gpu, **options)


def test_slots_without_a_model() -> None:
    private, public = ensemble(12, 200, shift=0.5, noise=0.5)
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    check(private, public, projection, orders=[3.0], num_models=50)


def test_identical_models_lose_next_to_nothing() -> None:
    """Also at a token of the last tile, far beyond the reach of the interpolants for all models."""
    private, public = ensemble(1, 129, shift=1.0, noise=0.0)
    private[..., -1] += 8.0
    private = private.expand(9, 2, 129)
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    with simulated.kernels():
        loss = adapmixed_ext.leave_one_out(private, public, projection, orders=[3.0, 64.0])
    assert torch.all(loss <= 1e-11)


@pytest.mark.parametrize("token", [1, 100, 190])
def test_a_masked_token_that_a_model_answers(token: int) -> None:
    """No loss of the position is bounded, whichever tile it lies in; others are."""
    private, public = ensemble(20, 192, shift=0.0, noise=0.5)
    public[0, token] = -math.inf
    weight = torch.full((20, 2), 0.3, dtype=torch.float64)
    with simulated.kernels():
        loss = adapmixed_ext.leave_one_out(private, public, weight, orders=2.0)
    assert torch.all(loss[:, 0].isinf()) and torch.all(loss[:, 1] < 1)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("models", [3, 20])
def test_emptied_members_lose_nothing(models: int, on_gpu: bool) -> None:
    """A row that differs by a bit that floats do not see, with the same sum, is not one of them."""
    private, public = (rows + 12 for rows in ensemble(models, 300, shift=0.0, noise=0.5))
    near = torch.linspace(5e-5, 6e-5, 100)
    above = torch.nextafter(near, torch.tensor(1.0))
    alike = (near * 2.6825111 == above * 2.6825111).nonzero()[0, 0]  # kOctavesPerNat
    public[:, 5] = near[alike]
    private[:2], private[1, :, 5] = public, above[alike]
    projection = adapmixed_ext.project(private, public, order=3, radius=0.03)
    assert torch.equal(projection.private_lse[1], projection.public_lse)
    with simulated.kernels() if on_gpu else contextlib.nullcontext():
        loss = adapmixed_ext.leave_one_out(
            private, public, projection, orders=[3.0], adjacency="zero_out"
        )
    assert torch.all(loss[0] == 0) and torch.all(loss[1:] > 0) and torch.all(loss[1] < 1e-12)
