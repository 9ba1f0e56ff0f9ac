"""What each model answers, p_bar_i: p_i projected into a Rényi ball or a density-ratio box."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .renyi import both_ways, log_excess, log_softmax, order_list

_HALVINGS = 72  # 708 nats (the smallest normal float64) to 2^-72 * 708 < 2e-19
_TINY = torch.finfo(torch.float64).tiny
_CLIP_ABSENT = -1e4  # log p/q, below which p counts as 0 under a box


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> tuple[Tensor, Tensor]:
    """lambda_i = max{w in [0, 1] : D<->_a(w p_i + (1 - w) q || q) <= R} (Algorithm 1, line 11).

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
    """log(w r + 1 - w) for r = p_i/q: by w (r - 1) near 1, by two logarithms elsewhere."""
    x = weight * torch.expm1(log_ratio)
    far = _log_mix(log_ratio, torch.zeros_like(log_ratio), weight, complement)
    return torch.where(x.abs() < 0.5, torch.log1p(x), far)


def _log_mix(log_p: Tensor, log_q: Tensor, weight: Tensor, complement: Tensor) -> Tensor:
    """log(w p + (1 - w) q)."""
    weighted = torch.where(weight > 0, weight.log() + log_p, -math.inf)
    return torch.logaddexp(weighted, complement.log() + log_q)


def clip_project(
    private_logits: Tensor, public_logits: Tensor, *, lower: float, upper: float
) -> Tensor:
    """p_bar_i = clip(s p_i, c q, C q) with the s that makes it sum to 1, (N, B, V).

    Found by bisection of log s. Where C q on the support of p_i is less than 1, the rest is spread
    over the other tokens as q is.
    """
    return _log_clip(private_logits, public_logits, lower, upper).exp()


def _log_clip(private_logits: Tensor, public_logits: Tensor, lower: float, upper: float) -> Tensor:
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    log_q = log_q.expand_as(log_p)
    if lower == 1 or upper == 1:
        return log_q
    q = log_q.exp()
    held = ~torch.isneginf(log_q) & (log_p - log_q >= _CLIP_ABSENT)
    ratio = torch.where(held, log_p - log_q, -math.inf)
    covered = torch.where(held, q, 0.0).sum(-1, keepdim=True)
    rest = ((1 - upper * covered) / (1 - covered)).clamp(lower, 1.0)
    least = -math.inf if lower == 0 else math.log(lower)

    def log_ratio(log_scale: Tensor) -> Tensor:
        return (ratio + log_scale).clamp(least, math.log(upper))

    low, high = torch.full_like(covered, math.log1p(-lower)), torch.full_like(covered, 2e4)
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
    """What the per-model filter is charged for p_bar_i (N, B, V): (N, B, K).

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


def log_projected(private_logits: Tensor, public_logits: Tensor, projection: Any) -> Tensor:
    """log p_bar_i, (N, B, V), of a bare weight, a pair, a Projection or a Clipping."""
    log_p, log_q = log_softmax(private_logits), log_softmax(public_logits)
    if not hasattr(projection, "log_scale"):
        return _log_mix(log_p, log_q, *weights_of(projection))
    bar = _log_clip(private_logits, public_logits, projection.lower, projection.upper)
    if projection.active is None:
        return bar
    return torch.where(projection.active.unsqueeze(-1), bar, log_q)


def weights_of(projection: Any) -> tuple[Tensor, Tensor]:
    """(weight, complement), each (N, B, 1), of a bare weight, a pair, or a Projection."""
    if isinstance(projection, Tensor):
        projection = (projection.double(), 1 - projection.double())
    elif not isinstance(projection, tuple):
        projection = (projection.weight, projection.complement)
    return projection[0].unsqueeze(-1), projection[1].unsqueeze(-1)
