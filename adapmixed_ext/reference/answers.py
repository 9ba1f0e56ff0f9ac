"""The distribution that a token is drawn from: the mixture, the log pool, the sampler's law."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .projections import log_projected
from .renyi import log_softmax

_UNITS = 2**1074  # in 1: every double is a multiple of 2^-1074


def mixture(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    """p = mean_i (w_i p_i + (1 - w_i) q), (B, V) (Algorithm 1, line 14)."""
    return _log_mixture(private_logits, public_logits, projection).exp()


def log_prob(
    private_logits: Tensor, public_logits: Tensor, projection: Any, targets: Tensor
) -> Tensor:
    """log p(target), (B,), of the same mixture."""
    log_p = _log_mixture(private_logits, public_logits, projection)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _log_mixture(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    log_bar = log_projected(private_logits, public_logits, projection)
    return torch.logsumexp(log_bar, dim=0) - math.log(private_logits.shape[0])


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
    """p ~ q exp((scale/N) sum_i u_i), u_i = clip(log p_i/q, lower, upper).

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


def sampling_weights(probabilities: Tensor, public_logits: Tensor) -> list[list[int]]:
    """The sampler's law: p in units of 2^-1074, but at least 1 where q > 0, and 0 where q = 0.

    Token v is drawn with probability w_v / sum(w). Python integers, exact.
    """
    rows = zip(probabilities.tolist(), (public_logits > -math.inf).tolist(), strict=True)
    return [
        [max(_units(p), 1) if held else 0 for p, held in zip(*row, strict=True)] for row in rows
    ]


def _units(p: float) -> int:
    numerator, denominator = p.as_integer_ratio()
    return numerator * (_UNITS // denominator)
