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
) -> tuple[Tensor, Tensor]:
    """Return max{w in [0, 1] : D<->_a(w p_i + (1 - w) q || q) <= R} (Algorithm 1, line 11).

    Returns (weight, complement), each (N, B), found by geometric bisection: of the weight below
    1/2, of the complement above it, where float64 cannot hold the weight (1 - 2e-22). Both lie on
    the feasible side, up to the rounding of the float64 constraint (some 1e-13 of it). A token
    with q = 0 < p_i admits only weight 0.
    """
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    masked = (torch.isneginf(log_q) & ~torch.isneginf(log_p)).any(-1)
    ratio = torch.where(torch.isneginf(log_q), 0.0, log_p - log_q)
    log_q = log_q.expand_as(ratio)

    def feasible(weight: Tensor, complement: Tensor) -> Tensor:
        mixed = _log_mix_ratio(ratio, weight.unsqueeze(-1), complement.unsqueeze(-1))
        return both_ways(log_q + mixed, log_q, mixed, order) <= radius

    one = torch.ones_like(ratio[..., 0])
    zero, half = 0 * one, one / 2
    whole = feasible(one, zero)
    upper = feasible(half, half)
    # The unknown is min(weight, complement); its feasible end is `small` for a weight below 1/2
    # and `large` for the complement of a weight above it.
    small, large = _TINY * one, half
    none = masked | ~(upper | feasible(small, one))
    for _ in range(_HALVINGS):
        middle = small.sqrt() * large.sqrt()
        weight = torch.where(upper, 1 - middle, middle)
        complement = torch.where(upper, middle, 1 - middle)
        raise_small = feasible(weight, complement) != upper
        small = torch.where(raise_small, middle, small)
        large = torch.where(raise_small, large, middle)
    weight = torch.where(whole, one, torch.where(upper, 1 - large, small))
    complement = torch.where(whole, zero, torch.where(upper, large, 1 - small))
    return torch.where(none, zero, weight), torch.where(none, one, complement)


def _log_mix_ratio(log_ratio: Tensor, weight: Tensor, complement: Tensor) -> Tensor:
    """Return log(w r + 1 - w) for r = p_i/q: by w (r - 1) near 1, by two logarithms elsewhere."""
    x = weight * torch.expm1(log_ratio)
    far = log_mix(log_ratio, torch.zeros_like(log_ratio), weight, complement)
    return torch.where(x.abs() < 0.5, torch.log1p(x), far)


def log_mix(log_p: Tensor, log_q: Tensor, weight: Tensor, complement: Tensor) -> Tensor:
    """Return log(w p + (1 - w) q)."""
    weighted = torch.where(weight > 0, weight.log() + log_p, -math.inf)
    return torch.logaddexp(weighted, complement.log() + log_q)


def weights_of(projection: Any) -> tuple[Tensor, Tensor]:
    """Return (weight, complement), each (N, B, 1), of a weight, a pair, or a Projection."""
    if not isinstance(projection, tuple):
        weight = projection if isinstance(projection, Tensor) else projection.weight
        projection = (weight.double(), 1 - weight.double())
    return projection[0].unsqueeze(-1), projection[1].unsqueeze(-1)
