"""Noisy screening: the test that decides whether the ensemble answers a query."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._renyi import divergence_of_logs, log_softmax


def screen(
    private_logits: Tensor,
    public_logits: Tensor,
    noise: Tensor,
    *,
    weight: float,
    order: float,
    threshold: float,
    top_k: int,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the divergence and whether it passes, each (B,) (Algorithm 1, lines 1–7).

    Column j of ``noise`` (B, top_k) goes to the j-th most likely public token, ties by lower
    index, before re-scaling. A noisy score that is zero everywhere counts +inf.
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    slots = num_models or private_logits.shape[0]
    on = torch.ones_like(log_p[..., :1]) if active is None else active.unsqueeze(-1).double()
    # s as a sum of nonnegative numbers, (slots - A + (1 - w) A)/slots q + w/slots sum p_i over the
    # A active rows, in logarithms; where it is near q, by its difference from q.
    count = on.sum(0)
    log_rest = torch.log(((slots - count) + (1 - weight) * count) / slots) + log_q
    log_sum = torch.logsumexp(log_p + on.log(), 0)
    log_share = math.log(weight / slots) if weight > 0 else -math.inf
    log_s = torch.logaddexp(log_rest, log_share + log_sum)
    shift = weight / slots * ((log_p.exp() - log_q.exp()) * on).sum(0)
    divergence = torch.full_like(log_q[:, 0], math.inf)
    for b, logits in enumerate(public_logits):
        keep = min(top_k, int((logits > -math.inf).sum()))
        top = torch.sort(logits.double(), descending=True, stable=True).indices[:keep]
        added, base = noise[b, :keep], log_q[b, top]
        x = (shift[b, top] + added) / base.exp()
        noisy = (log_s[b, top].exp() + added).clamp(min=0.0).log()
        log_ratio = torch.where(added == 0, log_s[b, top], noisy) - base
        log_ratio = torch.where(x.abs() < 0.5, torch.log1p(x), log_ratio)
        log_kept = torch.log_softmax(base, -1)
        scale = torch.logsumexp(log_kept + log_ratio, -1)
        if bool(scale > -math.inf):
            log_ratio = log_ratio - scale
            divergence[b] = divergence_of_logs(log_kept + log_ratio, log_kept, log_ratio, order)
    return divergence, divergence <= threshold
