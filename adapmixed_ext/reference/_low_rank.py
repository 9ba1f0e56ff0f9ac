"""The logits of members that adapt the output layer."""

from __future__ import annotations

import torch
from torch import Tensor


def add_low_rank(
    start: Tensor, coefficients: Tensor, factors: Tensor, models: int, tokens: Tensor | None = None
) -> Tensor:
    """Return z + Σ_k c_k u_k of N members, (N, B, K)."""
    rows = factors.double()
    chosen = rows[tokens] if tokens is not None else rows.expand(len(coefficients), *rows.shape)
    added = torch.einsum("bgkm,bvgkm->gmbv", coefficients.double(), chosen).flatten(0, 1)
    return start.double() + added[:models]
