"""Ensembles with bad rows, and what CUDA answers where the CPU raises an error at once."""

from __future__ import annotations

import math

import pytest
import torch
from draws import FixedRng
from torch import Tensor

import adapmixed_ext

NAN, INF = math.nan, math.inf
# (model, position, value): one logit gets the value; -inf fills the row. Model -1 is public.
KINDS: dict[str, tuple[tuple[int, int, float], ...]] = {
    "private NaN": ((1, 0, NAN),),
    "private rows": ((2, 1, INF), (1, 2, -INF)),
    "public NaN": ((-1, 1, NAN),),
    "public +inf": ((-1, 2, INF),),
    "public empty": ((-1, 0, -INF),),
    "both": ((0, 0, NAN), (-1, 1, INF), (2, 1, -INF)),
}


def logits(kind: str) -> tuple[Tensor, Tensor]:
    """Return private (5, 4, 37) and public (4, 37) logits with the bad values of `kind`."""
    generator = torch.Generator().manual_seed(0)
    public = torch.randn(4, 37, generator=generator)
    private = public + 0.3 * torch.randn(5, 4, 37, generator=generator)
    for model, position, value in KINDS[kind]:
        row = public[position] if model < 0 else private[model, position]
        row[slice(None) if value == -INF else slice(5, 6)] = value
    return private, public


def raised(private: Tensor, public: Tensor) -> str:
    """Return the error of a call on the CPU."""
    with pytest.raises(ValueError) as caught:
        adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    return str(caught.value)


def check(private: Tensor, public: Tensor, error: str) -> None:
    """Check that bad rows are reported by ``check()``, have no weight and let nothing be drawn."""
    projection = adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    floats = adapmixed_ext.project(private, public, order=3.0, radius=0.03)
    clipping = adapmixed_ext.clip_project(private, public, lower=0.5, upper=2.0, orders=2.0)
    pool = adapmixed_ext.log_pool(private, public, lower=-0.25, upper=1.0, scale=2.0)
    noise = torch.zeros(len(public), 3, dtype=torch.float64, device=public.device)
    screening = adapmixed_ext.screen(
        private, public, noise, weight=0.3, order=2.0, threshold=1e9, top_k=3
    )
    bad = projection.status != 0
    worst = bad.any(0)
    assert worst.any() and not worst.all()
    for found in (projection, floats, clipping, pool, screening):
        assert torch.equal(found.status != 0, bad)
        with pytest.raises(ValueError) as caught:
            found.check()
        assert str(caught.value) == error
    for found in (projection, floats):
        assert (found.weight[bad] == 0).all() and (found.complement[bad] == 1).all()
    assert clipping.charge is not None and (clipping.charge[bad] == INF).all()
    assert torch.equal(pool.span.isnan(), bad) and pool.log_normaliser[worst].isnan().all()
    assert (screening.divergence[worst] == INF).all() and not screening.passed[worst].any()
    for way in adapmixed_ext.renyi_divergence(private, public, [1.5, 2.0]):
        assert torch.equal((way == INF).all(-1), bad) and not way.isnan().any()
    for weights in (projection, clipping, torch.full_like(projection.weight, 0.5)):
        loss = adapmixed_ext.leave_one_out(private, public, weights, orders=[2.0, 18.0])
        assert (loss[:, worst] == INF).all() and loss[:, ~worst].isfinite().all()
    targets = torch.zeros(len(public), dtype=torch.int64, device=public.device)
    for weights in (clipping, pool, projection):
        mixture = adapmixed_ext.mixture(private, public, weights)
        assert mixture[worst].isnan().all() and not mixture[~worst].isnan().any()
        log_prob = adapmixed_ext.log_prob(private, public, weights, targets)
        assert torch.equal(log_prob.isnan(), worst) or weights is clipping
    tokens = adapmixed_ext.sample(mixture, public, rng=FixedRng(1))
    assert torch.equal(tokens == -1, worst)
