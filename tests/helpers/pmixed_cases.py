"""PMixED with a budget of one query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapmixed.mechanisms import PMixED, Ticket
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.published import PublishedPMixED

DELTA = 1e-5


def budget(order: float, per_query: float, queries: int = 1, **settings: Any) -> PMixED:
    """Return the mechanism whose Rényi budget per query is ``per_query``."""
    epsilon = c_alpha(order, DELTA) + queries * per_query
    return PMixED(epsilon, DELTA, queries, order, **settings)


def published(order: float, per_query: float, queries: int = 1, **settings: Any) -> PublishedPMixED:
    """Return the published mechanism with this budget."""
    return PublishedPMixED(
        c_alpha(order, DELTA) + queries * per_query, DELTA, queries, order, **settings
    )


def rows(masses: list[list[float]]) -> Tensor:
    """Return float32 logits (B, V) for rows of probabilities."""
    return torch.tensor(masses, dtype=torch.float64).log().float()


def answer(mechanism: PMixED, private: Tensor, public: Tensor, seed: int = 0) -> Ticket:
    return mechanism.propose(private, public, rng=SeededRandom(seed))
