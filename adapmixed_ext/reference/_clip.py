"""Members clipped to a density-ratio box around the public model, and their charges."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._renyi import log_excess, log_softmax, order_list

_CLIP_ABSENT = -600.0  # log p, below which p counts as 0 under a box


def clip_project(
    private_logits: Tensor, public_logits: Tensor, *, lower: float, upper: float
) -> Tensor:
    """Return p_bar_i = clip(s p_i, c q, C q), (N, B, V), with the s that makes it sum to 1.

    Found by bisection of log s. Where C q on the support of p_i is less than 1, the rest is spread
    over the other tokens as q is.
    """
    return log_clip(private_logits, public_logits, lower, upper).exp()


def log_clip(private_logits: Tensor, public_logits: Tensor, lower: float, upper: float) -> Tensor:
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    log_q = log_q.expand_as(log_p)
    if lower == 1 or upper == 1:
        return log_q
    q = log_q.exp()
    held = ~torch.isneginf(log_q) & (log_p >= _CLIP_ABSENT)
    ratio = torch.where(held, log_p - log_q, -math.inf)
    covered = torch.where(held, q, 0.0).sum(-1, keepdim=True)
    rest = ((1 - upper * covered) / (1 - covered)).clamp(lower, 1.0)
    least = -math.inf if lower == 0 else math.log(lower)

    def log_ratio(log_scale: Tensor) -> Tensor:
        return (ratio + log_scale).clamp(least, math.log(upper))

    low, high = torch.full_like(covered, math.log1p(-lower)), torch.full_like(covered, 620.0)
    for _ in range(90):
        middle = (low + high) / 2
        reached = (q * log_ratio(middle).exp()).sum(-1, keepdim=True) >= 1
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    degenerate = torch.where(held, math.log(upper), rest.log())
    small = upper * covered + lower * (1 - covered) <= 1
    return log_q + torch.where(small, degenerate, log_ratio(high))


def clip_charge(
    distributions: Tensor,
    public_logits: Tensor,
    *,
    lower: float,
    orders: float | Sequence[float],
    num_models: int | None = None,
) -> Tensor:
    """Return the charges of p_bar_i (N, B, V) to the shards' own budgets, (N, B, K).

    D<->_a((N-1) c q + p_bar_i || (N-1) c q + q) of what is divided by N, without the linear terms.
    """
    models = num_models or distributions.shape[0]
    log_q = log_softmax(public_logits)
    ratio = torch.where(torch.isneginf(log_q), 1.0, distributions / log_q.exp())
    others = (models - 1) * lower
    log_ratio = torch.log((ratio + others) / (1 + others))
    share = math.log((1 + others) / models)
    charges = []
    for a in order_list(orders):
        forward = log_q + log_excess(a, log_ratio)
        backward = log_q + log_ratio + log_excess(a, -log_ratio)
        lost = torch.isneginf(log_ratio) & ~torch.isneginf(log_q)
        backward = torch.where(lost, math.inf, backward)
        log_sum = torch.maximum(forward.logsumexp(-1), backward.logsumexp(-1)) + share
        charges.append(torch.logaddexp(torch.zeros_like(log_sum), log_sum) / (a - 1))
    return torch.stack(charges, -1)
