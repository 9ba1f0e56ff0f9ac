"""screen: the noisy test whether a query is answered by the members at all.

Memory on CUDA, in bytes beyond inputs and results: 16 for each of top_k tokens of a position,
rounded up to a power of two, if that is above 2048.
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import _validate as check
from ._registry import ENSEMBLE, backend, ensemble, register
from .inputs import Inputs, prepare
from .types import Screening

_ops = torch.ops.adapmixed


# screen: (divergence, passed)
def _screen(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, noise, active, weight, order, threshold, top_k, num_models = args
    divergence, passed = _screen_fake(*args)
    inputs = noise.data_ptr(), 0 if active is None else active.data_ptr()
    options = weight, order, threshold, top_k, num_models
    pointers = divergence.data_ptr(), passed.data_ptr()
    on = backend(noise.device)
    size = on.workspace("screen", tuple(tensors[0].shape), top_k)
    arguments = *ensemble(*tensors), *inputs, *options, *pointers
    on.call("screen", tensors[0], *arguments, workspace=size)
    return divergence, passed


def _screen_fake(*args: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(args[3]), torch.empty_like(args[3], dtype=torch.bool)


register(
    f"screen({ENSEMBLE}, Tensor noise, Tensor? active, float weight, float order,"
    " float threshold, int top_k, int num_models) -> (Tensor, Tensor)",
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
    """Noisy screening (Algorithm 1, lines 1–8).

    s = mean_i λ_s p_i + (1−λ_s) q on the public top-k tokens K (ties by lower index), plus noise,
    negative values set to 0, **then** both s[K] and q[K] re-scaled to sum 1;
    passed = D_α(s‖q[K]) ≤ T_s. A row with fewer than k tokens of q > 0 uses them all.
    The divergence is exact within ``loss_error``, 1e-12 absolute below that, at every weight; where
    negative noise cancels s, what it leaves is known to 1e-15 of what there was. It is +inf where
    nothing is left, and exactly 0 of a single token, or where nothing moves s from q.

    Args:
        private_logits, public_logits: (N, B, V) and (B, V).
        noise: (B, top_k) float64, N(0, σ²) by rank of the token; zeros give the noiseless test.
        weight: λ_s in [0, 1].
        order: α > 1.
        threshold: T_s ≥ 0, in nats; inf lets everything pass.
        top_k: k ≥ 1.
        num_models: the divisor of the mean, ≥ N; absent slots answer q.
        active: (N, B) bool, slots that take part; the others answer q. None: all.

    On CUDA nothing is raised for bad rows and for noise that is not finite: the divergence is +inf
    and nothing passes but under a threshold of inf. ``check()`` raises for the rows, for the noise
    nothing does.
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
    """:func:`screen` on prepared inputs."""
    private = inputs.private
    weight = check.number("weight", weight, least=0.0, most=1.0)
    order = check.order("order", order)
    threshold = check.number("threshold", threshold, least=0.0)
    top_k = check.integer("top_k", top_k, 1)
    models, positions = private.shape[:2]
    noise = check.typed("noise", noise, torch.float64, (positions, top_k), private)
    noise = _ops.checked(noise, "noise", -math.inf, math.inf)
    if active is not None:
        active = check.typed("active", active, torch.bool, (models, positions), private)
    slots = check.slots(num_models, private)
    divergence, passed = _ops.screen(
        *inputs[:4], noise, active, weight, order, threshold, top_k, slots
    )
    return Screening(divergence, passed, inputs.status, inputs.public_status)
