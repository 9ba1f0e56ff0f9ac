"""screen: the noisy test that decides whether the members answer a query at all.

Memory, in bytes beyond inputs and results: 16 for each public logit while the likeliest tokens
are found, then 16 for each of top_k tokens of a position.
"""

import math
from typing import Any

import torch
from torch import Tensor

from adapmixed.limits import check_count, check_number, check_order

from . import _tensors as check
from ._registry import ENSEMBLE, address, backend, ensemble, register
from .inputs import Inputs, likeliest, prepare
from .types import Screening

_ops = torch.ops.adapmixed


# screen: (divergence, passed)
def _screen(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, noise, tokens, active, weight, order, threshold, num_models = args
    divergence, passed = _screen_fake(*args)
    log_ratios = torch.empty_like(noise)
    pointers = address(active), *map(address, (noise, tokens, log_ratios))
    options = weight, order, threshold, tokens.shape[1], num_models, *pointers
    results = divergence.data_ptr(), passed.data_ptr()
    backend(noise.device).call("screen", tensors[0], ensemble(*tensors), options, *results)
    return divergence, passed


def _screen_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[3]), torch.empty_like(args[3], dtype=torch.bool)


register(
    f"screen({ENSEMBLE}, Tensor noise, Tensor tokens, Tensor? active, float weight, float order,"
    " float threshold, int num_models) -> (Tensor, Tensor)",
    _screen,
    _screen_fake,
)


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
) -> Screening:
    """Run the noisy screening of every position (Algorithm 1, lines 1–7).

    s = mean_i λ_s p_i + (1−λ_s) q on the public top-k tokens K (ties by lower index). The noise is
    added to s, and negative values are set to 0. **Then** s[K] and q[K] are re-scaled to sum 1. A
    position passes if D_α(s‖q[K]) ≤ T_s. A row with fewer than k tokens of q > 0 uses them all.

    The relative error of the divergence is at most 1e-5, or 1e-12 absolute if that is more, at
    every weight. If negative noise cancels s, the rest is known to 1e-15 of what there was. Values
    of s below 1e-290 count as 0. The divergence is +inf if nothing is left, and it may be +inf if
    (α−1) D_α is above 600. It is exactly 0 for a single token, and if s equals q.

    On CUDA nothing is raised for bad rows or for noise that is not finite. Their divergence is
    +inf, and they pass only under a threshold of inf. ``check()`` raises for bad rows, but not for
    bad noise.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        noise: (B, top_k) float64, N(0, σ²) by rank of the token; zeros give the noiseless test.
        weight: λ_s in [0, 1].
        order: Rényi order α in (1, 1 024].
        threshold: T_s ≥ 0, in nats; inf lets everything pass.
        top_k: k ≥ 1.
        num_models: public number of members, ≥ N, the divisor of the mean; an absent member
            answers q.
        active: (N, B) bool, the members that take part; the others answer q. None: all.

    Returns:
        The divergence, (B,) float64 in nats, and whether it passed, (B,) bool.

    Raises:
        ValueError: wrong shapes, dtypes or devices; a number outside its range; noise that is not
            finite; a row with NaN, +inf or no finite value.
    """
    return screen_prepared(
        prepare(private_logits, public_logits),
        noise,
        weight=weight,
        order=order,
        threshold=threshold,
        top_k=top_k,
        num_models=num_models,
        active=active,
    )


def screen_prepared(
    inputs: Inputs,
    noise: Tensor,
    *,
    weight: float,
    order: float,
    threshold: float,
    top_k: int,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> Screening:
    """Run :func:`screen` on prepared inputs."""
    private = inputs.private
    weight = check_number("weight", weight, least=0.0, most=1.0)
    order = check_order(order)
    threshold = check_number("threshold", threshold, least=0.0, infinite=True)
    top_k = check_count("top_k", top_k)
    models, positions = private.shape[:2]
    noise = check.typed("noise", noise, torch.float64, (positions, top_k), private)
    noise = _ops.checked(noise, "noise", -math.inf, math.inf)
    tokens = likeliest(inputs.public, min(top_k, private.shape[2]), by_rank=True)
    noise = noise.narrow(1, 0, tokens.shape[1]).contiguous()
    if active is not None:
        active = check.typed("active", active, torch.bool, (models, positions), private)
    slots = check.slots(num_models, private)
    divergence, passed = _ops.screen(
        *inputs[:4], noise, tokens, active, weight, order, threshold, slots
    )
    return Screening(divergence, passed, inputs.status, inputs.public_status)
