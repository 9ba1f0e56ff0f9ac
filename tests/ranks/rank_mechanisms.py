"""Mechanisms and logits of five members, for tests that spread them over processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)

MODELS, POSITIONS, VOCAB = 5, 6, 61
SCREEN: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.02, threshold=0.15, screen_top_k=9
)
POOL: dict[str, Any] = dict(lower=-0.5, upper=1.0, scale=2.0)
# Each mechanism with the epsilon of every shard's budget, or None. Some members, but not all, spend
# their budgets before the last position.
MECHANISMS: dict[str, tuple[Mechanism, float | None]] = {
    "public": (PublicOnly(), None),
    "unprotected": (Unprotected(), None),
    "adapmixed": (AdaPMixED(**SCREEN), None),
    "adapmixed, public screen": (AdaPMixED(**(SCREEN | dict(screen="public"))), None),
    "adapmixed, orders": (
        AdaPMixED(3.0, 0.4, screen=None, loss_orders=(2.0, 3.0, 18.0)), None,
    ),
    "adapmixed, leave-one-out": (
        AdaPMixED(18.0, 0.2, screen=None, adjacency="add_remove"), None,
    ),
    "adapmixed, fixed": (AdaPMixED(**SCREEN, loss="fixed"), None),
    "pmixed": (PMixED(8.0, 1e-5, 1000, 6.0), None),
    "clipped-mixing": (ClippedMixing(0.6, 2.0, queries=100), None),
    "clipped-mixing, unsure": (ClippedMixing(0.6, 2.0, queries=100, public_confidence=0.2), None),
    "clipped-mixing, budgets": (ClippedMixing(0.5, 2.0, order=8.0), 1.27),
    "clipped-log-pool": (ClippedLogPool(**POOL), None),
    "clipped-log-pool, unsure": (ClippedLogPool(**POOL, public_confidence=0.2), None),
    "clipped-log-pool, budgets": (ClippedLogPool(**POOL), 2.4),
}  # fmt: skip


def logits(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return logits (N, B, V) and (B, V) with an empty shard, masked tokens and ties in q."""
    generator = torch.Generator().manual_seed(seed)
    public = (2.0 * torch.randn(POSITIONS, VOCAB, generator=generator)).round(decimals=0)
    private = public + torch.randn(MODELS, POSITIONS, VOCAB, generator=generator)
    private[1] = public
    public[:, 3] = private[:, :, 3] = -math.inf
    private[2, :, 5] = -math.inf
    return private, public
