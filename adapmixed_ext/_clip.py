"""clip_project: members clipped to a density-ratio box, p̄ = clip(s p, c q, C q), and charges."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapmixed.limits import check_orders

from . import _tensors as check
from ._registry import address, backend, ensemble, register
from .inputs import log_sum_exp
from .types import Clipping, raise_row_errors

_ops = torch.ops.adapmixed


# clip_project: (log_scale, residual, charge, private_lse, status); charge is empty without orders.
def _clip_project(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, public_lse, lower, upper, orders, num_models = args
    results = _clip_project_fake(*args)
    values = array("d", orders)
    on = backend(private_logits.device)
    on.call(
        "clip_project",
        private_logits,
        ensemble(private_logits, public_logits, public_lse),
        (lower, upper, *values.buffer_info(), num_models),
        tuple(map(address, results)),
        workspace=on.workspace("clip_project", tuple(private_logits.shape)),
    )
    if on.immediate:
        raise_row_errors("private_logits", results[4])
    return results


def _clip_project_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_lse, orders = args[0], args[2], args[5]
    scale = public_lse.new_empty(private_logits.shape[:2])
    charge = public_lse.new_empty((*scale.shape, len(orders)))
    status = torch.empty_like(scale, dtype=torch.int32)
    return scale, torch.empty_like(scale), charge, torch.empty_like(scale), status


register(
    "clip_project(Tensor private_logits, Tensor public_logits, Tensor public_lse, float lower,"
    " float upper, float[] orders, int num_models) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _clip_project,
    _clip_project_fake,
)


def clip_project(
    private_logits: Tensor,
    public_logits: Tensor,
    *,
    lower: float,
    upper: float,
    orders: float | Sequence[float] | None = None,
    num_models: int | None = None,
    active: Tensor | None = None,
) -> Clipping:
    """Clip every model to the density-ratio box [c, C] around q: the KL projection onto the box.

    p̄_i = clip(s p_i, c q, C q), with s such that it sums to 1. Of all distributions x with
    c q ≤ x ≤ C q, it minimises KL(p_i‖x), KL(x‖p_i) and every other f-divergence.

    - If q of the support of p_i is at most (1−c)/(C−c), p̄_i = C q there and the same multiple of
      q elsewhere. Tokens with p_i < e^−600 count as p_i = 0.
    - The sum is 1 within 1e-12 + 2^−52·(|log s| + |lse|), lse the public log-sum-exp. Its rounding
      is the same factor for all rows of a position. So the sums of two of them differ by 1e-12 at
      most.
    - Every ratio lies in [c, C]. Ratios inside the box have a relative error of 1e-9, or that of
      the sum that defines s: 1e-14 over the mass inside the box.
    - A row equal to the public one gives q exactly, and so do c = 1 and C = 1.

    With `orders`, also the charge of each model to its shard's own budget under zero-out. It
    depends on the model's row and on public values alone. With U = p̄_i/q, W = ((N−1)c + 1)/N,
    P = ((N−1)c + U)/N and f(x) = x^α − 1 − α(x−1), it is

        max{log1p Σ q W f(P/W), log1p Σ q P f(W/P)} / (α−1),

    of p̄_i as it is returned: an upper bound, at most 2e-5 of itself and 2e-12 above it, and 0 for a
    row equal to the public one. A member that is not active is charged as if it took part.
    Memory: at most 37·V + 2^17 bytes for each thread.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        lower: c in [0, 1], a ratio.
        upper: C in [1, 1e6], a ratio; C/c ≤ 1e6 unless c is 0.
        orders: Rényi orders of the charges, each in (1, 1 024], at most 8. None: no charges.
        num_models: public number of members, ≥ N, for the charges.
        active: (N, B) bool, the members that take part; the others answer q. None: all.

    Returns:
        The rows' log s and residual ratio, each (N, B) float64, and the charges, (N, B, K) float64
        in nats, or None.

    Raises:
        ValueError: wrong shapes, dtypes or devices; lower, upper, orders or num_models out of
            range; a tensor that requires grad; a row with NaN, +inf or no finite value.
    """
    c, d = check.box(lower, upper)
    values = [] if orders is None else check_orders(orders)
    private, public = check.ensemble_logits(private_logits, public_logits)
    slots = check.slots(num_models, private)
    if active is not None:
        active = check.typed("active", active, torch.bool, tuple(private.shape[:2]), private)
    public_lse, public_status = log_sum_exp(public, "public_logits")
    scale, residual, charge, private_lse, status = _ops.clip_project(
        private, public, public_lse, c, d, values, slots
    )
    return Clipping(
        scale, residual, None if orders is None else charge, active, private_lse, public_lse,
        status, c, d, public_status,
    )  # fmt: skip
