"""The mixture of the projected members, which the token is drawn from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._clip import log_clip
from ._project import log_mix, weight_of
from ._renyi import log_softmax


def mixture(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    """Return p = mean_i (w_i p_i + (1 - w_i) q), (B, V) (Algorithm 1, line 14)."""
    return _log_mixture(private_logits, public_logits, projection).exp()


def log_prob(
    private_logits: Tensor, public_logits: Tensor, projection: Any, targets: Tensor
) -> Tensor:
    """Return log p(target), (B,), of the same mixture."""
    log_p = _log_mixture(private_logits, public_logits, projection)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def _log_mixture(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    log_bar = log_projected(private_logits, public_logits, projection)
    return torch.logsumexp(log_bar, dim=0) - math.log(private_logits.shape[0])


def log_projected(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    """Return log p_bar_i, (N, B, V), of a weight, a Projection or a Clipping."""
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    if not hasattr(projection, "log_scale"):
        return log_mix(log_p, log_q, weight_of(projection))
    bar = log_clip(private_logits, public_logits, projection.lower, projection.upper)
    if projection.active is None:
        return bar
    return torch.where(projection.active.unsqueeze(-1), bar, log_q)
