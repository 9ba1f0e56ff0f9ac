"""Members projected into a Rényi ball around the public model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ._renyi import both_ways, log_softmax

_HALVINGS = 72  # 708 nats (the smallest normal float64) to 2^-72 * 708 < 2e-19
_TINY = torch.finfo(torch.float64).tiny


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> Tensor:
    """Return max{w in [0, 1] : D<->_a(w p_i + (1 - w) q || q) <= R} (Algorithm 1, line 11).

    The weights (N, B), found by geometric bisection, are on the feasible side up to the rounding
    of the float64 constraint (some 1e-13 of it). A token with q = 0 < p_i admits only weight 0.
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    masked = (torch.isneginf(log_q) & ~torch.isneginf(log_p)).any(-1)
    ratio = torch.where(torch.isneginf(log_q), 0.0, log_p - log_q)
    log_q = log_q.expand_as(ratio)

    def feasible(weight: Tensor) -> Tensor:
        mixed = _log_mix_ratio(ratio, weight.unsqueeze(-1))
        return both_ways(log_q + mixed, log_q, mixed, order) <= radius

    large = torch.ones_like(ratio[..., 0])
    small = _TINY * large
    none, whole = masked | ~feasible(small), feasible(large)
    for _ in range(_HALVINGS):
        middle = small.sqrt() * large.sqrt()
        fits = feasible(middle)
        small, large = torch.where(fits, middle, small), torch.where(fits, large, middle)
    return torch.where(none, 0.0, torch.where(whole, 1.0, small))


def _log_mix_ratio(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Return log(w r + 1 - w) for r = p_i/q: by w (r - 1) near 1, by two logarithms elsewhere."""
    x = weight * torch.expm1(log_ratio)
    far = log_mix(log_ratio, torch.zeros_like(log_ratio), weight)
    return torch.where(x.abs() < 0.5, torch.log1p(x), far)


def log_mix(log_p: Tensor, log_q: Tensor, weight: Tensor) -> Tensor:
    """Return log(w p + (1 - w) q)."""
    weighted = torch.where(weight > 0, weight.log() + log_p, -math.inf)
    return torch.logaddexp(weighted, (1 - weight).log() + log_q)


def weight_of(projection: Any) -> Tensor:
    """Return the weight (N, B, 1) of a weight or a Projection."""
    weight = projection if isinstance(projection, Tensor) else projection.weight
    return weight.double().unsqueeze(-1)
