"""project on the simulated GPU: feasible weights near the optimum, whatever the threads do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import simulated
import torch
from checks import check_weights
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Projection

Ensemble = tuple[Tensor, Tensor]


def ensemble(models: int, vocab: int, *, noise: float, seed: int = 0) -> Ensemble:
    generator = torch.Generator().manual_seed(seed)
    public = 3 * torch.randn(1, vocab, generator=generator)
    return public + noise * torch.randn(models, 1, vocab, generator=generator), public


def raised_and_lowered(vocab: int) -> Ensemble:
    """Return a row whose tokens all matter equally, half of them forward and half in reverse."""
    generator = torch.Generator().manual_seed(0)
    sign = 1.0 - 2.0 * (torch.arange(vocab) % 2)
    private = 6.0 * sign + 0.01 * torch.randn(1, vocab, generator=generator)
    return private.unsqueeze(0), torch.zeros(1, vocab)


def project(
    private: Tensor, public: Tensor, order: float, radius: float, threads: str = "forward"
) -> Projection:
    with simulated.kernels(threads, sizes_of_a_gpu=True):
        return adapmixed_ext.project(private, public, order=order, radius=radius)


def check(private: Tensor, public: Tensor, order: float, radius: float, found: Projection) -> None:
    rows = public.expand(len(private), -1)
    report = check_weights(private[:, 0], rows, found.weight.T, found.complement.T, order, [radius])
    assert not report.failures, report.failures


# Large targets, of which few groups of tokens matter; and small ones: chains of multiplications,
# powers, and careful terms.
@pytest.mark.parametrize(
    "order,radius,noise",
    [
        (18.0, 3.6, 0.7),
        (18.0, 3.6, 1.5),
        (2.5, 20.0, 1.0),
        (3.0, 0.03, 0.7),
        (64.0, 0.01, 0.7),
        (17.5, 0.03, 0.7),
        (2.5, 1e-4, 0.7),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_rows(dtype: torch.dtype, order: float, radius: float, noise: float) -> None:
    private, public = (t.to(dtype) for t in ensemble(3, 1900, noise=noise))
    private[..., 5::90] = public[..., 5::90] = -math.inf
    private[1, 0, 7] = -math.inf
    found = project(private, public, order, radius)
    check(private, public, order, radius, found)
    for threads in ("reverse", "random"):
        again = project(private, public, order, radius, threads)
        assert torch.equal(again.weight, found.weight)


def test_extreme_rows() -> None:
    private, public = ensemble(1, 300, noise=0.5)
    rare = public.clone(), private.clone()
    for row in rare:
        row[..., 9] -= 50.0
    far = private.clone()
    far[..., 3] += 1000.0
    many = raised_and_lowered(7000)
    for given, (order, radius) in [
        ((private, public), (3.0, 1e-6)),
        ((rare[1], rare[0]), (3.0, 0.03)),
        ((private + 900.0, public + 900.0), (3.0, 0.03)),
        ((far, public), (18.0, 3.6)),
        (many, (18.0, 1.2)),
        ((private, public), (3.0, 5.0)),
        ((private, public), (1024.0, 600.0 / 1024.0)),
    ]:
        found = project(*given, order, radius)
        check(*given, order, radius, found)


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(2, torch.bfloat16), (3, torch.float32), (1023, torch.bfloat16), (1025, torch.float32)],
)
def test_rows_of_any_alignment(dtype: torch.dtype, vocab: int) -> None:
    """One-sided masks and log-sum-exps far apart, at every alignment."""
    private, public = ensemble(5, vocab, noise=1.2, seed=vocab)
    private[1] += 300.0
    private[2, 0, vocab // 2 + 1 :] = -math.inf
    private[:, 0, -1:] -= 0.5
    if vocab > 3:
        public[0, 2], private[:4, 0, 2] = -math.inf, -math.inf
    private, public = private.to(dtype), public.to(dtype)
    for order, radius in ((18.0, 3.6), (64.0, 0.4), (3.0, 0.03), (2.5, 0.4)):
        for threads in ("forward", "reverse"):
            found = project(private, public, order, radius, threads)
            check(private, public, order, radius, found)
        if vocab > 3:
            assert found.weight[4, 0] == 0.0 and found.complement[4, 0] == 1.0


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_log_sum_exps_are_those_of_doubles(offset: float) -> None:
    private, public = ensemble(3, 1500, noise=1.5)
    private, public = (private + offset).float(), (public + offset).float()
    private[2, 0, 8] += 45.0
    found = project(private, public, 18.0, 3.6)
    z = private[:, 0].double().numpy().astype(np.longdouble)
    top = z.max(-1, keepdims=True)
    exact = top[:, 0] + np.log(np.exp(z - top).sum(-1))
    error = np.abs(found.private_lse[:, 0].numpy() - exact)
    assert (error <= 3e-14 + 4.5e-16 * np.abs(exact)).all(), error


@pytest.mark.parametrize(
    "dtype,vocab", [(torch.float32, 700), (torch.float32, 14000), (torch.bfloat16, 7000)]
)
@pytest.mark.parametrize("order,radius", [(18.0, 1.2), (64.5, 0.4)])
def test_all_groups_matter(vocab: int, dtype: torch.dtype, order: float, radius: float) -> None:
    private, public = (t.to(dtype) for t in raised_and_lowered(vocab))
    check(private, public, order, radius, project(private, public, order, radius, "random"))


def test_thousands_of_tokens_matter_in_reverse() -> None:
    """Only tokens that the model lacks decide, and they take a weight near 1."""
    generator = torch.Generator().manual_seed(2)
    public = torch.randn(1, 9001, generator=generator)
    private = (public + torch.where(torch.arange(9001) % 4 > 0, -9.0, 0.0)).unsqueeze(0)
    found = project(private, public, 18.0, 3.6)
    check(private, public, 18.0, 3.6, found)
    assert 0.9 < found.weight[0, 0] < 1.0
