"""Log-sum-exps far apart: the error of the rounded difference of two logits grows with them.

In floats it is a relative error of p/q of |lse - lse_0| units. It matters if p/q is large: for the
losses with four or more models, for the weights at targets near 1.
"""

from __future__ import annotations

import math
import random

import checks
import pytest
import torch
from checks import ADJACENCIES, Report
from torch import Tensor

import adapmixed_ext

OFFSETS = (30.3, 51.7, 103.1, 317.9, 611.3, 990.7, 2999.9)


def raised_token(seed: int, offset: float) -> tuple[Tensor, Tensor]:
    """Return models that raise one rare token by somewhat different factors."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    models, others = choose.choice((1, 4, 8, 16)), choose.choice((1, 2, 48))
    rare = 10 ** choose.uniform(-6, -2)
    base = torch.full((1, 1 + others), math.log(rare / (1 - rare)))
    base[:, 1:] = 0.0
    if others == 48:
        base[:, 2:] = -1.3 + torch.randn(47, generator=generator)
    share = choose.choice((0.3, 0.5, 0.9))
    private = base.expand(models, 1, -1).clone()
    private[..., 0] = math.log(share / (1 - share))
    noise = torch.randn(private.shape, generator=generator)
    private += choose.choice((0.1, 0.3, 0.6)) * noise
    return (private, base + offset) if seed % 2 else (private + offset, base)


@pytest.mark.parametrize("offset", OFFSETS)
def test_bounds_hold_at_every_offset(offset: float, isa: str) -> None:
    report = Report()
    for seed in range(40):
        choose = random.Random(seed)
        private, public = raised_token(seed, offset)
        order, radius = choose.choice((2.0, 3.0, 5.0, 8.0)), choose.choice((1e-3, 0.03, 0.1, 0.5))
        result = adapmixed_ext.project(private, public, order=order, radius=radius)
        rows = private[:, 0], public.expand(len(private), -1)
        weights = result.weight.T, result.complement.T
        report.add(checks.check_weights(*rows, *weights, order, [radius], f"seed {seed}"))
        orders = [choose.choice((1.5, 2.0, 3.0, 5.0, 18.0))]
        for adjacency in ADJACENCIES:
            loss = adapmixed_ext.leave_one_out(
                private, public, result, orders=orders, adjacency=adjacency
            )
            report.add(
                checks.check_losses(
                    private, public, result.weight, result.complement, loss, orders, adjacency,
                    [0, len(private) - 1], f"seed {seed}",
                )
            )  # fmt: skip
    assert report.values > 200
    assert not report.failures, "\n".join(report.failures[:5])


@pytest.mark.parametrize("order,radius", [(2.0, 1e-8), (18.0, 1e-8), (63.0, 1e-7), (256.0, 1e-8)])
@pytest.mark.parametrize("offset", [1e3, 9e5])
def test_what_large_log_sum_exps_take_of_a_weight(
    order: float, radius: float, offset: float
) -> None:
    """A weight misses at most what ``project`` states; at 9e5 that is more than 1e-5."""
    generator = torch.Generator().manual_seed(5)
    public = torch.randn(1, 63, generator=generator)
    private = public + torch.randn(8, 1, 63, generator=generator)
    private = (16 * private).round() / 16  # exact with and without the offset
    moved = private - offset
    assert torch.equal(moved + offset, private)
    expected = adapmixed_ext.project(private, public, order=order, radius=radius)
    found = adapmixed_ext.project(moved, public, order=order, radius=radius)
    lse = found.private_lse.abs() + found.public_lse.abs()
    stated = 1e-5 + 1.8e-15 * lse * (order + math.sqrt(2.0 * order / radius))
    missing = 1.0 - found.weight / expected.weight
    assert (missing <= stated).all() and (missing >= 0.0).all()
    assert (missing.max() > 1e-5) == (offset > 1e5)
