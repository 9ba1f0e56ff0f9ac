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
    for seed in range(20):
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
    assert report.values > 100
    assert not report.failures, "\n".join(report.failures[:5])
