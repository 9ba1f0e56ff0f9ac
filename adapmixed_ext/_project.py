"""project: the largest weights that keep members within a Rényi ball around the public model.

Every module of an operator holds its schema, its implementation, its fake, and the function that
checks the arguments and calls it.
"""

from typing import Any

import torch
from torch import Tensor

from adapmixed import limits

from . import _tensors as check
from ._registry import F64, address, backend, ensemble, register
from .inputs import Inputs
from .types import Projection, raise_row_errors

_ops = torch.ops.adapmixed


# project: (weight, private_lse, status, public_lse, public_status)
def _project(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, order, radius = args
    results = _project_fake(*args)
    on = backend(private_logits.device)
    on.call(
        "project",
        private_logits,
        ensemble(private_logits, public_logits),
        order,
        radius,
        tuple(map(address, results)),
        workspace=on.workspace("project", tuple(private_logits.shape)),
    )
    if on.immediate:
        raise_row_errors("public_logits", results[4])
        raise_row_errors("private_logits", results[2])
    return results


def _project_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits = args[:2]
    weight = private_logits.new_empty(private_logits.shape[:2], dtype=F64)
    status = torch.empty_like(weight, dtype=torch.int32)
    public_lse = public_logits.new_empty(public_logits.shape[:1], dtype=F64)
    public_status = torch.empty_like(public_lse, dtype=torch.int32)
    own = weight, torch.empty_like(weight), status
    return *own, public_lse, public_status


register(
    "project(Tensor private_logits, Tensor public_logits, float order, float radius)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _project,
    _project_fake,
)


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> Projection:
    """Find the largest mixing weight of every model that stays in the Rényi ball around q.

    λ_i = max{λ ∈ [0,1] : D↔_α(λ p_i + (1−λ) q ‖ q) ≤ R} (Algorithm 1, line 11).

    λ is never above the exact optimum. It is within 2e-4 + 1e-5/(α−1) of it, relative, if R ≥ 1e-5,
    1.01 ≤ α ≤ 64 and every token has q ≥ e^−70. Otherwise it may be smaller: still the safe side.
    Unless λ = 1 is feasible, λ ≤ 1 − 4e-6.

    A token masked in the public row but not in the private one gives λ_i = 0, and so does p/q above
    e^85. At R = 0 λ_i is 0.
    Memory: at most 32·V + 2^14 bytes for each thread. CUDA takes about (N + 1)·B·V/7 bytes during
    the call.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        order: Rényi order α in (1, 1 024].
        radius: R = βα ≥ 0, in nats, (α − 1) R ≤ 600.

    Returns:
        The weights λ, (N, B) float64.

    Raises:
        ValueError: wrong shapes, dtypes or devices; an argument outside the limits; a tensor that
            requires grad; a row with NaN, +inf or no finite value. On CUDA such a
            row has weight 0, and ``check()`` of the result raises.
    """
    return project_inputs(private_logits, public_logits, order=order, radius=radius)[1]


def project_inputs(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> tuple[Inputs, Projection]:
    """Return the result of :func:`project` with the checked logits for further operators."""
    order = limits.check_order(order)
    radius = limits.check_radius(radius, order)
    private, public = check.ensemble_logits(private_logits, public_logits)
    weight, private_lse, status, public_lse, public_status = _ops.project(
        private, public, order, radius
    )
    rows = private_lse, public_lse, status, public_status
    return Inputs(private, public, *rows), Projection(weight, *rows)
