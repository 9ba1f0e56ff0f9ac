"""Bad rows, and what the operators say of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import plans
import pytest
import torch
from plans import INF, Source, logits
from torch import Tensor

import adapmixed_ext

# Bad rows: (model, position, value), in which one logit gets the value, and -inf fills the row.
# Model -1 is public.

BAD: dict[str, tuple[tuple[int, int, float], ...]] = {
    "private NaN": ((1, 0, math.nan),),
    "private rows": ((2, 1, INF), (1, 2, -INF)),
    "public NaN": ((-1, 1, math.nan),),
    "public +inf": ((-1, 2, INF),),
    "public empty": ((-1, 0, -INF),),
    "both": ((0, 0, math.nan), (-1, 1, INF), (2, 1, -INF)),
}


def bad(kind: str) -> tuple[Tensor, Tensor]:
    """Return private (5, 4, 37) and public (4, 37) logits with the bad values of `kind`."""
    private, public = logits(0, 5, 4, 37, 1.0, 0.3)
    for model, position, value in BAD[kind]:
        row = public[position] if model < 0 else private[model, position]
        row[slice(None) if value == -INF else slice(5, 6)] = value
    return private, public


def raised(private: Tensor, public: Tensor) -> str:
    """Return the error of a call on the CPU."""
    with pytest.raises(ValueError) as caught:
        adapmixed_ext.project(private, public, order=18.0, radius=3.6)
    return str(caught.value)


def check_bad_rows(private: Tensor, public: Tensor, error: str) -> None:
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
    for result in (projection, floats, clipping, pool, screening):
        assert torch.equal(result.status != 0, bad)
        with pytest.raises(ValueError) as caught:
            result.check()
        assert str(caught.value) == error
    for result in (projection, floats):
        assert (result.weight[bad] == 0).all()
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
    tokens = adapmixed_ext.sample(mixture, public, rng=Source(1))
    assert torch.equal(tokens == -1, worst)


def check_what_no_status_reports(device: torch.device) -> None:
    """Check targets, weights, noise and probabilities that the CPU refuses.

    A call that is only queued cannot raise: it answers NaN, +inf or token -1.
    """
    private, public = (rows.to(device) for rows in plans.logits(0, 5, 2, 70, 1.0, 0.3))
    weight = torch.full((5, 2), 0.25, dtype=torch.float64, device=device)
    for target in (-1, 70):
        targets = torch.tensor([3, target], device=device)
        log_prob = adapmixed_ext.log_prob(private, public, weight, targets)
        assert log_prob.isnan().tolist() == [False, True]
    weight[1, 1] = 1.5
    loss = adapmixed_ext.leave_one_out(private, public, weight, orders=2.0)
    assert (loss[:, 1] == INF).all() and loss[:, 0].isfinite().all()
    assert adapmixed_ext.mixture(private, public, weight)[1].isnan().all()
    noise = torch.zeros(2, 6, dtype=torch.float64, device=device)
    noise[1, 2] = math.nan
    screening = adapmixed_ext.screen(
        private, public, noise, weight=0.1, order=2.0, threshold=5.0, top_k=6
    )
    assert screening.passed.tolist() == [True, False] and screening.divergence[1] == INF
    p, q = public.double().softmax(-1).repeat(3, 1), public.repeat(3, 1)
    p[0] *= 1.1
    p[1, 3], p[1, 4] = -p[1, 3], p[1, 4] + 2 * p[1, 3]  # the sum stays
    p[2, 3] = math.nan
    p[3], q[3, 0] = 0.0, -INF
    p[3, 0] = 1.0
    tokens = adapmixed_ext.sample(p, q, rng=Source(1))
    assert (tokens[:4] == -1).all() and (tokens[4:] >= 0).all()


def run_on_changed_rows(private: Tensor, public: Tensor) -> None:
    """Run operators on rows that are bad, or changed since their log-sum-exps were taken.

    Whatever they answer, `make sanitize` sees whether they stay within their memory.
    """
    ops, shape = torch.ops.adapmixed, private.shape[:2]
    half = private.new_full(shape, 0.5, dtype=torch.float64)
    targets = torch.zeros(len(public), dtype=torch.int64, device=public.device)
    exact = [torch.logsumexp(rows.double(), -1) for rows in (private, public)]
    for sums in (exact, [torch.zeros_like(lse) for lse in exact]):
        inputs = (private, public, *sums, half, half, 0.0, 0.0, None)
        calls: list[Callable[[], Any]] = [
            *(partial(ops.leave_one_out, *inputs, [1.5, 18.0], zero_out, shape[0])
              for zero_out in (False, True)),
            *(partial(ops.clip_project, private, public, sums[1], lower, 2.0, [1.5, 18.0], shape[0])
              for lower in (0.5, 0.0)),
            partial(ops.mixture, *inputs), partial(ops.log_prob, *inputs, targets),
        ]  # fmt: skip
        for call in calls:
            with suppress(ValueError):  # on the CPU
                call()
