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


def cross_entropy(
    public_logits: Tensor, coefficients: Tensor, factors: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses, (n,), and the derivatives of their sum by c, (n, r), and by u, (r, V).

    Args:
        public_logits: (n, V).
        coefficients: c, (n, r).
        factors: u, (r, V), not in packs.
        targets: (n,) int64.
    """
    c, u = coefficients.double(), factors.double()
    log_p = (public_logits.double() + c @ u).log_softmax(-1)
    slope = log_p.exp()
    slope[torch.arange(len(targets)), targets] -= 1.0
    return -log_p.gather(1, targets[:, None])[:, 0], slope @ u.T, c.T @ slope
