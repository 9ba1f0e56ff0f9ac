"""Errors of the logarithmic pool, as in test_errors.py: they name argument, value and rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_errors import (
    INF,
    NAN,
    B,
    N,
    V,
    _log_pool,
    _log_prob,
    _loss,
    private,
    public,
    refuses,
)
from torch import Tensor

import adapmixed_ext


def _pooled(p: Tensor, q: Tensor, **options: Any) -> Any:
    pool = options.pop("pool", None) or _log_pool(p, q)
    return adapmixed_ext.mixture(p, q, pool)


def test_boxes() -> None:
    call = _log_pool
    for lower in (0.5, 1e-300, NAN, -INF, INF, -1.1e6, "0", None, True):
        refuses(lambda x=lower: call(private(), public(), lower=x), "lower", lower)
    for upper in (-0.5, -1e-300, NAN, INF, -INF, 1.1e6, "1", None, True):
        refuses(lambda x=upper: call(private(), public(), upper=x), "upper", upper)
    for slots in (N - 1, 0, -1, 3.0, "3"):
        refuses(lambda n=slots: call(private(), public(), num_models=n), "num_models")
    refuses(lambda: call(private(), public(), num_models=2**31 + 1), "num_models", 2**31 + 1)
    refuses(lambda: call(private(), public(), upper=1e6, num_models=2148), "upper", 2148)
    active = torch.ones(N, B + 1, dtype=torch.bool)
    refuses(lambda: call(private(), public(), active=active), "active", (N, B + 1), (N, B))
    refuses(lambda: call(private(), public(), active=torch.ones(N, B)), "active", torch.float32)


def test_the_scale_of_a_pool() -> None:
    for scale in (-0.5, NAN, INF, "1", None):
        refuses(lambda x=scale: _log_pool(private(), public(), scale=x), "scale", scale)
    refuses(lambda: _log_pool(private(), public(), scale=1.1e6), "scale", "upper")


@pytest.mark.parametrize("name", ["private_lse", "public_lse", "log_normaliser"])
def test_a_pool_put_together_by_hand(name: str) -> None:
    pool = _log_pool(private(), public())
    value, right = getattr(pool, name), _pooled(private(), public(), pool=pool)
    wrong = replace(pool, **{name: value.float()})
    refuses(lambda: _pooled(private(), public(), pool=wrong), f"projection.{name}", torch.float32)
    cut = replace(pool, **{name: value[..., :1]})
    refuses(lambda: _pooled(private(), public(), pool=cut), f"projection.{name}")
    odd = torch.stack([value, torch.full_like(value, NAN)], -1)[..., 0]
    got = _pooled(private(), public(), pool=replace(pool, **{name: odd}))
    assert torch.equal(got, right)


def test_values_of_a_pool_are_checked() -> None:
    pool = _log_pool(private(), public())
    for name, value in (("lower", 0.5), ("upper", INF), ("scale", -1.0), ("num_models", N - 1)):
        wrong = replace(pool, **{name: value})
        refuses(lambda w=wrong: _pooled(private(), public(), pool=w), name, value)
    wrong = replace(pool, active=torch.ones(N, B))
    refuses(lambda: _pooled(private(), public(), pool=wrong), "projection.active", torch.float32)
    refuses(lambda: _loss(private(), public(), projection=pool), "projection", "LogPool")
    for targets in (torch.tensor([0, V]), torch.tensor([0, -1])):
        refuses(
            lambda t=targets: _log_prob(private(), public(), projection=pool, targets=t),
            "targets[1]", int(targets[1]), V,
        )  # fmt: skip
