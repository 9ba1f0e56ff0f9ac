"""Privacy losses of one answer: leave-one-out and zero-out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._mixture import log_projected
from ._project import weight_of
from ._renyi import both_ways, log_softmax, order_list


def leave_one_out(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Any,
    *,
    orders: float | Sequence[float],
    adjacency: str = "add_remove",
    num_models: int | None = None,
) -> Tensor:
    """Return D<->_a(p || p') of every model, (N, B, K); p is the mixture, p' that without model i.

    ``"add_remove"``: p' is the mean of the others, q if there is none. ``"zero_out"``: slot i
    answers q. ``num_models`` counts all slots; those without a row answer q.
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    models = num_models or private_logits.shape[0]
    log_bar = log_projected(private_logits, public_logits, projection)
    missing = models - private_logits.shape[0]
    log_missing = log_q + (math.log(missing) if missing else -math.inf)
    log_sum = torch.logaddexp(torch.logsumexp(log_bar, 0), log_missing)
    log_rest = torch.logaddexp(_log_sum_of_others(log_bar), log_missing)
    log_total = log_sum.expand_as(log_bar) - math.log(models)
    if models == 1:
        log_kept = log_q.expand_as(log_bar)
    elif adjacency == "zero_out":
        log_kept = torch.logaddexp(log_rest, log_q) - math.log(models)
    else:
        log_kept = log_rest - math.log(models - 1)
    both_absent = torch.isneginf(log_kept) & torch.isneginf(log_total)
    log_ratio = torch.where(both_absent, 0.0, log_kept - log_total)
    # p'/p = 1 + x from excesses over q where these are neither huge nor all close to -1: exact
    # where the models agree.
    gap = log_bar.amax(0) - log_q
    near = (gap > -0.7) & (gap < 30)
    if hasattr(projection, "log_scale"):
        excess = torch.expm1(torch.where(near, log_bar - log_q, 0.0))
    else:
        weight = weight_of(projection)
        excess = weight * torch.expm1(torch.where(near & (weight > 0), log_p - log_q, 0.0))
    mean = excess.sum(0) / models
    if adjacency == "zero_out" or models == 1:
        x = -excess / (models * (1 + mean))
    else:
        x = (mean - excess) / ((models - 1) * (1 + mean))
    log_ratio = torch.where(near & (x.abs() < 0.5), torch.log1p(x), log_ratio)
    losses = [both_ways(log_kept, log_total, log_ratio, a) for a in order_list(orders)]
    return torch.stack(losses, -1)


def _log_sum_of_others(log_values: Tensor) -> Tensor:
    """Return log sum_{j != i} e^{values[j]} along the first axis, without subtracting."""
    none = torch.full_like(log_values[:1], -math.inf)
    before, after = [none], [none]
    for j in range(log_values.shape[0] - 1):
        before.append(torch.logaddexp(before[-1], log_values[j : j + 1]))
        after.append(torch.logaddexp(after[-1], log_values[-1 - j].unsqueeze(0)))
    return torch.logaddexp(torch.cat(before), torch.cat(after[::-1]))
