"""The kernels of log_pool, mixture and sample: rows in parts, tiles of tokens, what they share."""

from __future__ import annotations

import math
from typing import Any

import cases
import pools
import pytest
import simulated
import torch
from checks import Report
from pools import SETTINGS, Setting
from torch import Tensor
from workload import Source

import adapmixed_ext
from adapmixed_ext import LogPool

USUAL = SETTINGS[0]


def pool_of(private: Tensor, public: Tensor, **more: Any) -> LogPool:
    return adapmixed_ext.log_pool(private, public, **{**USUAL.options(private.shape[0]), **more})


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[4]])
def test_several_parts_and_tiles(setting: Setting, dtype: torch.dtype) -> None:
    """Tokens 1100: two parts and five tiles, the last ones short; more rows than a block takes."""
    private, public = cases.logits(5, 19, 2, 1100, 3.0, 0.8)
    private[2, :, 570], public[:, 5] = -math.inf, -math.inf
    private, public = private.to(dtype), public.to(dtype)
    active = torch.arange(38).reshape(19, 2) % 3 > 0
    with simulated.kernels("random", 1):
        pool = pool_of(private, public, **setting.options(19), active=active)
        mixture = adapmixed_ext.mixture(private, public, pool)
        targets = torch.tensor([[0, 255, 256, 1099]]).expand(2, 4)
        log_prob = torch.stack(
            [adapmixed_ext.log_prob(private, public, pool, t) for t in targets.T.contiguous()], -1
        )
    truth = pools.Truth(private, public, setting, pool.private_lse, active)
    report = Report()
    pools.check_answers(truth, pool, mixture, targets, log_prob, report)
    assert not report.failures, report.failures
    assert abs(truth.lse - pool.private_lse.numpy()).max() < 5e-14


def test_parts_and_tiles_of_a_gpu() -> None:
    private, public = cases.logits(6, 2, 1, 4500, 2.0, 0.7)
    with simulated.kernels("reverse", sizes_of_a_gpu=True):
        pool = pool_of(private, public)
        mixture = adapmixed_ext.mixture(private, public, pool)
        token = adapmixed_ext.sample(mixture, public, rng=Source(4))
    assert torch.equal(token, adapmixed_ext.sample(mixture, public, rng=Source(4)))
    truth = pools.Truth(private, public, USUAL, pool.private_lse)
    assert abs(truth.lse - pool.private_lse.numpy()).max() < 5e-14
    assert abs(truth.log_p - mixture.log().numpy()).max() < truth.log_error.max()
