"""Ensembles of which AdaPMixED screens some queries, and PMixED with a budget of one query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from adapmixed.mechanisms import Mechanism, PMixED, Ticket
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.published import PublishedPMixED

DELTA = 1e-5
POSITIONS, VOCAB, MODELS, SEED = 60, 8, 3, 11

# The noise is as large as the scores and k is well below V, so that the order of noise and
# re-scaling decides some queries. The threshold splits the queries.
SETTINGS: dict[str, Any] = dict(
    order=3.0, target_leakage=0.04, screen_weight=0.7, sigma=0.06, threshold=0.25, screen_top_k=3
)


def ensemble(seed: int = 0, positions: int = POSITIONS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = 1.2 * torch.randn(positions, VOCAB, generator=generator)
    private = public + 0.8 * torch.randn(MODELS, positions, VOCAB, generator=generator)
    return private, public


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


def answer(mechanism: Mechanism, private: Tensor, public: Tensor, seed: int = 0) -> Ticket:
    return mechanism.propose(private, public, rng=SeededRandom(seed))
