"""The logarithmic pool of clipped log-ratios."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._renyi import log_softmax


def log_pool(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    lower: float,
    upper: float,
    scale: float,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p, its log-normaliser and the spans: p ~ q exp((scale/N) sum_i u_i).

    Returns (log p (B, V), the log-normaliser (B,), span = max u_i - min u_i (N, B) where q > 0).
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    absent = torch.isneginf(log_q)
    u = torch.where(absent, 0.0, log_p - log_q).clamp(lower, upper)
    most = torch.where(absent, -math.inf, u).amax(-1)
    span = most - torch.where(absent, math.inf, u).amin(-1)
    total = u.sum(0) if active is None else (u * active.unsqueeze(-1)).sum(0)
    log_weight = log_q + scale / (num_models or private_logits.shape[0]) * total
    log_normaliser = torch.logsumexp(log_weight, -1)
    return log_weight - log_normaliser.unsqueeze(-1), log_normaliser, span
