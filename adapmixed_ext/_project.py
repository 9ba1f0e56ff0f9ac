"""project: the largest weights that keep members within a Rényi ball around the public model.

As in every module of an operator: its schema, its implementation, its fake, and the function that
checks the arguments and calls it.
"""

from typing import Any

import torch
from torch import Tensor

from . import _validate as check
from ._registry import backend, register, rows
from .inputs import Inputs, log_sum_exp
from .types import Projection, raise_row_errors

_ops = torch.ops.adapmixed


# project: (weight, complement, private_lse, status)
def _project(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_logits, public_lse, order, radius = args
    results = project_fake(*args)
    on = backend(private_logits.device)
    on.call(
        "project",
        private_logits,
        tuple(private_logits.shape),
        rows(private_logits),
        rows(public_logits),
        public_lse.data_ptr(),
        order,
        radius,
        *(result.data_ptr() for result in results),
        workspace=on.workspace("project", tuple(private_logits.shape)),
    )
    if on.immediate:
        raise_row_errors("private_logits", results[3])
    return results


def project_fake(*args: Any) -> tuple[Tensor, ...]:
    private_logits, public_lse = args[0], args[2]
    weight = public_lse.new_empty(private_logits.shape[:2])
    status = torch.empty_like(weight, dtype=torch.int32)
    return weight, torch.empty_like(weight), torch.empty_like(weight), status


register(
    "project(Tensor private_logits, Tensor public_logits, Tensor public_lse, float order,"
    " float radius) -> (Tensor, Tensor, Tensor, Tensor)",
    _project,
    project_fake,
)


def project(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> Projection:
    """λ_i = max{λ ∈ [0,1] : D↔_α(λ p_i + (1−λ) q ‖ q) ≤ R} (Algorithm 1, line 12).

    Always the feasible side: λ is never above the exact optimum. It is within 1e-5 + 1.8e-15
    (|lse_i| + |lse_0|)(α + √(2α/R)) relative of it where (α−1)R ≥ max(1e-8, 1e-9 α, 1e-12 α²) and
    λ ≥ 1e-90 (else rounding takes more of λ, always to the safe side). The second term is rounding
    of the log-sum-exps: nothing beside the first, but where these near 10⁶ at a small R.
    A token masked in the public row but not in the private one gives λ_i = 0.
    Memory: at most 96·V + 2^14 for each thread.

    Args:
        private_logits: (N, B, V).
        public_logits: (B, V), same dtype and device.
        order: Rényi order α > 1.
        radius: R = βα ≥ 0, in nats.

    Raises:
        ValueError: shapes, dtypes, devices, order ≤ 1, radius < 0 or NaN, N = 0, V = 0, a tensor
            that requires grad, a row with NaN, +inf or no finite value. On CUDA such a row raises
            in ``check()`` of the result only; its weight is 0 before that.
    """
    return project_inputs(private_logits, public_logits, order=order, radius=radius)[1]


def project_inputs(
    private_logits: Tensor, public_logits: Tensor, *, order: float, radius: float
) -> tuple[Inputs, Projection]:
    """:func:`project` with the checked logits for further operators."""
    order = check.order("order", order)
    radius = check.number("radius", radius, least=0.0)
    private, public = check.ensemble_logits(private_logits, public_logits)
    public_lse, public_status = log_sum_exp(public, "public_logits")
    weight, complement, private_lse, status = _ops.project(
        private, public, public_lse, order, radius
    )
    rows = private_lse, public_lse, status, public_status
    return Inputs(private, public, *rows), Projection(weight, complement, *rows)
