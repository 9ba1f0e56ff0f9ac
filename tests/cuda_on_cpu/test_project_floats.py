"""project's first attempts on the simulated GPU: the rows they solve, and those left to double."""

from __future__ import annotations

import math

import numpy as np
import pytest
import simulated
import torch
from checks import check_weights
from regressions import REGRESSIONS
from test_project_lists import raised_and_lowered
from torch import Tensor

import adapmixed_ext
from adapmixed_ext import Projection

Ensemble = tuple[Tensor, Tensor]


def ensemble(models: int, vocab: int, *, noise: float, seed: int = 0) -> Ensemble:
    generator = torch.Generator().manual_seed(seed)
    public = 3 * torch.randn(1, vocab, generator=generator)
    return public + noise * torch.randn(models, 1, vocab, generator=generator), public


def project(
    private: Tensor, public: Tensor, order: float, radius: float, threads: str = "forward"
) -> tuple[Projection, Tensor]:
    """Return the projection, and whether each row was solved before the kernel in double."""
    with simulated.kernels(threads, sizes_of_a_gpu=True) as workspaces:
        found = adapmixed_ext.project(private, public, order=order, radius=radius)
    rows = private.shape[0] * private.shape[1]
    return found, workspaces[-1][-4 * rows :].view(torch.int32) == 1


def check(private: Tensor, public: Tensor, order: float, radius: float, found: Projection) -> None:
    rows = public.expand(len(private), -1)
    report = check_weights(private[:, 0], rows, found.weight.T, found.complement.T, order, [radius])
    assert not report.failures, report.failures


# Large targets, where the reverse constraint counts for every row that fits the ball as a whole.
# Small targets, with weights of a few hundredths to 1.
@pytest.mark.parametrize(
    "order,radius,noise",
    [(18.0, 3.6, 0.7), (18.0, 3.6, 1.5), (2.5, 20.0, 1.0), (3.0, 0.03, 0.7), (2.0, 0.1, 1.5),
     (18.0, 0.3, 1.5), (64.0, 0.01, 0.7)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_rows_are_served(
    dtype: torch.dtype, order: float, radius: float, noise: float
) -> None:
    private, public = (t.to(dtype) for t in ensemble(3, 1900, noise=noise))
    private[..., 5::90] = public[..., 5::90] = -math.inf
    private[1, 0, 7] = -math.inf
    found, done = project(private, public, order, radius)

    assert done[0] and done[2]
    check(private, public, order, radius, found)
    for threads in ("reverse", "random"):
        again, done_again = project(private, public, order, radius, threads)
        assert torch.equal(again.weight, found.weight) and torch.equal(done_again, done)
        assert torch.equal(again.private_lse, found.private_lse)


def test_every_input_that_ever_failed() -> None:
    seen = served = 0
    for k, known in enumerate(REGRESSIONS):
        private, public = known.case.private[:, :1], known.case.public[:1]
        if private.numel() > 6000:
            continue
        threads = simulated.ORDERS[k % len(simulated.ORDERS)][0]
        found, done = project(private, public, known.order, known.radius, threads)
        check(private, public, known.order, known.radius, found)
        seen += len(private)
        served += int(done.sum())
    assert seen > 10 and served > 0


def test_a_token_that_the_public_row_lacks() -> None:
    private, public = ensemble(2, 300, noise=0.5)
    public[0, 4] = private[0, 0, 4] = -math.inf
    for order, radius in ((18.0, 3.6), (3.0, 0.03)):
        found, done = project(private, public, order, radius)
        assert done.all()
        assert found.weight[0] > 0 and found.weight[1] == 0 and found.complement[1] == 1


def test_what_floats_cannot_do_is_left() -> None:
    private, public = ensemble(1, 300, noise=0.5)
    rare = public.clone(), private.clone()
    for row in rare:
        row[..., 9] -= 70.0
    far = private.clone()
    far[..., 3] += 1000.0
    wild = private.clone(), public.clone()
    wild[0][..., 6], wild[1][..., 6] = -600.0, -800.0  # r = e^200, q r^18 counts
    many = raised_and_lowered(6000)
    for given, (order, radius) in [
        ((private, public), (2.5, 0.1)),  # not an integer: no attempt
        ((private, public), (3.0, 1e-6)),
        ((rare[1], rare[0]), (3.0, 0.03)),
        ((private + 900.0, public + 900.0), (3.0, 0.03)),
        ((far, public), (18.0, 3.6)),
        (wild, (18.0, 3.6)),
        (many, (18.0, 1.2)),
        ((private + 2e5, public + 2e5), (18.0, 3.6)),  # scores are off by more than half a nat
        ((private, public), (3.0, 5.0)),  # 1 - weight is small, and needed accurately
    ]:
        found, done = project(*given, order, radius)
        assert not done.any(), (order, radius)
        check(*given, order, radius, found)


def test_masks_of_any_depth_are_served() -> None:
    for depth in (-1e3, -1e9, -3e38):
        private, public = ensemble(1, 400, noise=1.0)
        private[..., ::7] = public[..., ::7] = depth
        found, done = project(private, public, 18.0, 3.6)
        assert done.all(), depth
        check(private, public, 18.0, 3.6, found)


def test_positions_in_groups() -> None:
    """Two positions of three models share a workspace, which changes no answer."""
    generator = torch.Generator().manual_seed(3)
    public = 3 * torch.randn(5, 200, generator=generator)
    private = public + torch.randn(3, 5, 200, generator=generator)
    for order, radius in ((18.0, 3.6), (3.0, 0.03)):
        with simulated.kernels() as workspaces:
            together = adapmixed_ext.project(private, public, order=order, radius=radius)
        rows = simulated.module().project_workspace((3, 2, 200))
        assert workspaces[-1].numel() == rows  # enough for two positions
        for position in range(5):
            here = slice(position, position + 1)
            alone, _ = project(private[:, here], public[here], order, radius)
            assert torch.equal(alone.weight, together.weight[:, here])


@pytest.mark.parametrize("offset", [0.0, 300.0, -9e5])
def test_log_sum_exps_are_those_of_doubles(offset: float) -> None:
    private, public = ensemble(3, 1500, noise=1.5)
    private, public = (private + offset).float(), (public + offset).float()
    private[2, 0, 8] += 45.0
    found, _ = project(private, public, 18.0, 3.6)
    z = private[:, 0].double().numpy().astype(np.longdouble)
    top = z.max(-1, keepdims=True)
    exact = top[:, 0] + np.log(np.exp(z - top).sum(-1))
    error = np.abs(found.private_lse[:, 0].numpy() - exact)
    assert (error <= 3e-14 + 4.5e-16 * np.abs(exact)).all(), error
