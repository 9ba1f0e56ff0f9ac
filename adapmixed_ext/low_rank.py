"""The logits of members that adapt the output layer alone: z_i = z_0 + Σ_k c_ik u_ik.

Every element is a chain of fused multiply-adds in single precision, which starts with z_0 and takes
k in order. So a row's bits depend on that row's operands alone: not on N, B, the number of threads
or the instruction set. Matrix libraries do not promise this.
"""

import torch
from torch import Tensor

from . import _validate as check
from ._registry import backend


def can_add_low_rank(public_logits: Tensor) -> bool:
    """Return whether `add_low_rank` takes rows of this dtype on this device."""
    return public_logits.dtype == torch.float32 and public_logits.device.type == "cpu"


def add_low_rank(
    public_logits: Tensor, coefficients: Tensor, factors: Tensor, private_logits: Tensor
) -> None:
    """Write the private rows. Only float32 on a CPU is taken.

    Args:
        public_logits: z_0, (B, V).
        coefficients: c, (N, B, r).
        factors: u, (N, r, V), contiguous.
        private_logits: z_i, (N, B, V), contiguous; its former values do not matter.

    Raises:
        ValueError: wrong shapes, dtypes or devices, or rows that are not contiguous.
    """
    for name, one, axes in (("public_logits", public_logits, 2), ("factors", factors, 3)):
        if check.tensor(name, one).dim() != axes:
            raise ValueError(f"{name} must have {axes} dimensions, got {one.dim()}")
    models, rank, vocab = factors.shape
    positions = public_logits.shape[0]
    shapes = {
        "public_logits": (public_logits, (positions, vocab)),
        "coefficients": (coefficients, (models, positions, rank)),
        "factors": (factors, (models, rank, vocab)),
        "private_logits": (private_logits, (models, positions, vocab)),
    }
    for name, (one, shape) in shapes.items():
        check.typed(name, one, torch.float32, shape, public_logits)
        if one.device.type != "cpu":
            raise ValueError(f"{name} must lie on the CPU, got {one.device}")
        if one.is_neg():  # its memory holds the numbers with the other sign
            raise ValueError(f"{name} must not be a lazily negated view: call resolve_neg()")
    for name in ("factors", "private_logits"):
        if not shapes[name][0].is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    start, chosen = public_logits.contiguous(), coefficients.contiguous()
    backend(start.device).call(
        "add_low_rank", start, (models, positions, vocab), start.data_ptr(), chosen.data_ptr(),
        factors.data_ptr(), rank, private_logits.data_ptr(),
    )  # fmt: skip
