"""Mechanisms and logits of an ensemble of five, for tests that spread it over ranks."""

from __future__ import annotations

import math
import warnings
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
    Shaped,
    Unprotected,
)
from adapmixed.privacy import FilterBudget

MODELS, POSITIONS, VOCAB = 5, 6, 61
SCREEN: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.02, threshold=0.15, top_k=9
)
POOL = dict(lower=-0.5, upper=1.0, scale=2.0)


def published(**settings: Any) -> Mechanism:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PMixED(60.0, 1e-5, 10, 6, analysis="published", **settings)


MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "adapmixed": AdaPMixED(**SCREEN),
    "adapmixed, public screen": AdaPMixED(**(SCREEN | dict(screen="public"))),
    "adapmixed, no screen": AdaPMixED(3.0, 0.4, screen=None, loss_orders=(2.0, 3.0, 18.0)),
    "adapmixed, zero-out": AdaPMixED(18.0, 0.2, screen=None, adjacency="zero_out"),
    "adapmixed, fixed": AdaPMixED(**SCREEN, loss="fixed"),
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
    "pmixed, sampled": PMixED(8.0, 1e-5, 1000, 6.0, sample_rate=0.5),
    "pmixed, published": published(),
    "pmixed, published, sampled": published(sample_rate=0.4),
    "clipped-mixing": ClippedMixing(0.6, 2.0, queries=100),
    "clipped-mixing, public rules": ClippedMixing(0.6, 2.0, top_k=7, sure_above=0.2),
    "clipped-log-pool": ClippedLogPool(**POOL),
    "clipped-log-pool, public rules": ClippedLogPool(**POOL, top_k=7, sure_above=0.2),
    "clipped-log-pool, N constant": ClippedLogPool(**POOL, num_models=MODELS + 2),
    "shaped": Shaped(ClippedLogPool(**POOL), temperature=0.7, top_k=11),
    "shaped, adapmixed": Shaped(AdaPMixED(**SCREEN), temperature=1.3, top_k=20),
}
# Budgets under which some slots, not all, have retired before the last position.
FILTERED: dict[str, tuple[Mechanism, FilterBudget]] = {
    "clipped-mixing": (
        ClippedMixing(0.5, 2.0, charge_order=8.0), FilterBudget("renyi", 0.05, 1e-5, 8.0),
    ),
    "clipped-log-pool": (ClippedLogPool(**POOL), FilterBudget("zcdp", 0.15, 1e-5)),
    "clipped-log-pool, N constant": (
        ClippedLogPool(**POOL, num_models=MODELS + 2), FilterBudget("zcdp", 0.1, 1e-5),
    ),
}  # fmt: skip


def logits(seed: int = 3) -> tuple[Tensor, Tensor]:
    """(N, B, V) and (B, V): an emptied shard, tokens that q or a model lacks, ties in q."""
    generator = torch.Generator().manual_seed(seed)
    public = (2.0 * torch.randn(POSITIONS, VOCAB, generator=generator)).round(decimals=0)
    private = public + torch.randn(MODELS, POSITIONS, VOCAB, generator=generator)
    private[1] = public
    public[:, 3] = private[:, :, 3] = -math.inf
    private[2, :, 5] = -math.inf
    return private, public


TARGETS = torch.tensor([0, 5, 10, 20, 60, 7])
