"""Proposals over a few random logits."""

from __future__ import annotations

from typing import Any

import torch

from adapmixed import ClippedLogPool, ClippedMixing
from adapmixed.mechanisms import Mechanism, Ticket
from adapmixed.rng import SecureRandom

DELTA = 1e-5
POOL, BOX = ClippedLogPool(-1.0, 1.0), ClippedMixing(0.5, 4.0, queries=10)


def proposed(
    mechanism: Mechanism, models: int = 3, positions: int = 1, seed: int = 0, rng: Any = None
) -> Ticket:
    """Return a proposal that was not charged."""
    generator = torch.Generator().manual_seed(seed)
    private = 3 * torch.randn(models, positions, 8, generator=generator)
    public = torch.randn(positions, 8, generator=generator)
    return mechanism.propose(private, public, rng=rng or SecureRandom())
