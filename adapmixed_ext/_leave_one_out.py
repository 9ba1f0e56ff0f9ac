"""leave_one_out: the privacy loss of every member."""

from array import array
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from adapmixed.limits import check_orders

from . import _tensors as check
from ._registry import WEIGHTED, backend, register, weighted
from .inputs import log_sum_exp, refuse_foreign, weighted_inputs
from .types import Clipping, Projection

_ops = torch.ops.adapmixed

Adjacency = Literal["add_remove", "zero_out"]


# leave_one_out: (N, B, K)
def _leave_one_out(*args: Any) -> Tensor:
    *inputs, orders, zero_out, num_models = args
    loss = _leave_one_out_fake(*args)
    balance = torch.empty_like(inputs[2])
    on = backend(loss.device)
    size = on.workspace("leave_one_out", tuple(inputs[0].shape), len(orders))
    values = array("d", orders)
    options = *values.buffer_info(), zero_out, num_models
    arguments = *weighted(*inputs), options, loss.data_ptr(), balance.data_ptr()
    on.call("leave_one_out", inputs[0], *arguments, workspace=size)
    if on.immediate:
        refuse_foreign("private_logits", ~(balance.abs() <= 1e-5))
        # The balance tells of p̄_i − q alone. CUDA's kernels add up q themselves.
        own, _ = log_sum_exp(inputs[1], "public_logits")
        refuse_foreign("public_logits", ~((own - inputs[3]).abs() <= 1e-5))
    return loss


def _leave_one_out_fake(*args: Any) -> Tensor:
    private_lse, orders = args[2], args[-3]
    loss: Tensor = private_lse.new_empty((*private_lse.shape, len(orders)))
    return loss


register(
    f"leave_one_out({WEIGHTED}, float[] orders, bool zero_out, int num_models) -> Tensor",
    _leave_one_out,
    _leave_one_out_fake,
)


def leave_one_out(
    private_logits: Tensor,
    public_logits: Tensor,
    projection: Projection | Clipping | Tensor,
    *,
    orders: float | Sequence[float],
    adjacency: Adjacency = "add_remove",
    num_models: int | None = None,
) -> Tensor:
    """Compute the privacy loss of every model: D↔_α between the answers with and without it.

    The loss is D↔_α(p‖p') (Algorithm 1, line 16; equation 3) with p = mean_i p̄_i. For zero-out
    p' = p − (p̄_i − q)/N. For add/remove p' = (N p − p̄_i)/(N−1), which is q if N = 1.

    Every loss is an upper bound, at most 1e-4 of the exact loss (4e-4 at orders above 32) and 1e-9
    above it. A row equal to the public one has a zero-out loss of exactly 0. A loss that cannot be
    bounded is +inf, never NaN: one of more than 600/(α−1), or at a token with q < e⁻⁷⁰ about which
    a model speaks (of a Clipping it may be too large instead), or to which every model gives
    less than e⁻⁸⁰ q.

    On CUDA nothing is raised for bad data, here or later. All losses of a position are +inf if its
    rows are bad or do not belong to the projection, or if a weight is outside [0, 1].

    Memory in bytes: at most 2048·N + 2^19 for each thread, and 64·N·B + 2^16. The sums over chunks
    of the vocabulary add min(B·S, S + 2^25), S = 2048·N·(K+4).

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        projection: a Projection or Clipping of these logits, or a weight tensor (N, B) in [0, 1].
        orders: one order or up to 8 orders, each in (1, 1 024].
        adjacency: "add_remove" or "zero_out".
        num_models: public number of members, ≥ N; an absent member answers q.

    Returns:
        (N, B, K) float64, in nats. Losses are private, for the operator only. They are +inf if one
        of the two mixtures lacks a token of the other.

    Raises:
        ValueError: wrong shapes, dtypes or devices; an argument outside the limits; num_models < N;
            bad rows, or rows that do not belong to the projection.
    """
    values = check_orders(orders)
    if adjacency not in ("add_remove", "zero_out"):
        raise ValueError(f"adjacency must be 'add_remove' or 'zero_out', got {adjacency!r}")
    ensemble = weighted_inputs(private_logits, public_logits, projection)
    slots = check.slots(num_models, ensemble[0])
    loss: Tensor = _ops.leave_one_out(*ensemble, values, adjacency == "zero_out", slots)
    return loss
