"""Rényi divergences of logits.

Everything is one quantity, D_a(P || Q), with L = log P/Q at hand. Since sum Q (P/Q - 1) = 0,

    (a - 1) D_a(P || Q) = log1p( sum Q ((1 + x)^a - 1 - a x) ),    1 + x = e^L,

whose terms are all >= 0, so that nothing cancels when P and Q are close. The terms are kept as
logarithms: a token with q = 1e-300 and ratio 1e290 overflows neither way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_SERIES_TERMS = 16


def renyi_divergence(
    p_logits: Tensor, q_logits: Tensor, orders: float | Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return D_a(P || Q) and D_a(Q || P) of rows of logits (..., V), each (..., K), in nats."""
    log_p, log_q = log_softmax(p_logits), log_softmax(q_logits)
    ratio = torch.where(torch.isneginf(log_p) & torch.isneginf(log_q), 0.0, log_p - log_q)
    log_p, log_q = log_p.expand_as(ratio), log_q.expand_as(ratio)
    forward = [divergence_of_logs(log_p, log_q, ratio, a) for a in order_list(orders)]
    backward = [divergence_of_logs(log_q, log_p, -ratio, a) for a in order_list(orders)]
    return torch.stack(forward, -1), torch.stack(backward, -1)


def divergence_of_logs(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, order: float) -> Tensor:
    """Return D_a(P || Q) over the last axis.

    ``log_ratio`` is L, given apart: it is known better than the difference of two logarithms.
    P = Q = 0 counts 0, P > 0 = Q gives +inf.
    """
    absent = torch.isneginf(log_p) & torch.isneginf(log_q)
    unsupported = torch.isneginf(log_q) & ~absent
    ratio = torch.where(torch.isneginf(log_q), torch.zeros_like(log_ratio), log_ratio)
    log_sum = torch.logsumexp(log_q + log_excess(order, ratio), dim=-1)
    value = torch.logaddexp(torch.zeros_like(log_sum), log_sum) / (order - 1)
    return torch.where(unsupported.any(-1), torch.full_like(value, math.inf), value)


def both_ways(log_p: Tensor, log_q: Tensor, log_ratio: Tensor, order: float) -> Tensor:
    """Return D<->_a, the larger of D_a(P || Q) and D_a(Q || P)."""
    forward = divergence_of_logs(log_p, log_q, log_ratio, order)
    return torch.maximum(forward, divergence_of_logs(log_q, log_p, -log_ratio, order))


def log_excess(order: float, log_ratio: Tensor) -> Tensor:
    """Return log((1 + x)^a - 1 - a x) for e^L = 1 + x, L in [-inf, inf], a > 1."""
    eta = order - 1
    x = torch.expm1(log_ratio)
    series = 2 * x.abs().log() + _binomial_tail(order, x).log()
    # Differences of terms of size eta, not of size 1, with the power itself factored out above 1.
    decay = torch.exp(-eta * log_ratio)
    above = -torch.expm1(-eta * log_ratio) + eta * torch.expm1(-log_ratio) * decay
    below = torch.exp(log_ratio) * torch.expm1(eta * log_ratio) - eta * x
    exact = torch.where(log_ratio >= 0, order * log_ratio + above.log(), below.log())
    return torch.where(x.abs() * order < 0.05, series, exact)


def _binomial_tail(order: float, x: Tensor) -> Tensor:
    """Return ((1 + x)^a - 1 - a x) / x^2 = sum_{k >= 2} binom(a, k) x^{k-2}, a |x| small."""
    coefficient = order * (order - 1) / 2
    total, power = torch.zeros_like(x), torch.ones_like(x)
    for k in range(2, 2 + _SERIES_TERMS):
        total = total + coefficient * power
        coefficient *= (order - k) / (k + 1)
        power = power * x
    return total


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities in float64; the maximum is subtracted first, to keep gaps."""
    logits = logits.double()
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def order_list(orders: float | Sequence[float]) -> list[float]:
    return [float(a) for a in orders] if isinstance(orders, Sequence) else [float(orders)]
