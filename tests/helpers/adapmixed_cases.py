"""Ensembles on which AdaPMixED screens some queries, and Algorithm 1 computed by hand."""

from __future__ import annotations

from typing import Any

import torch
from exact import Step, algorithm_1, stated
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import AdaPMixED, Ticket
from adapmixed.rng import SeededRandom

POSITIONS, VOCAB, MODELS, SEED = 60, 8, 3, 11


# The noise is as large as the scores and k is well below V, so that the order of noise and
# re-scaling decides some queries. The threshold splits the queries.
SETTINGS: dict[str, Any] = dict(
    order=3.0, target_leakage=0.04, screen_weight=0.7, sigma=0.06, threshold=0.25, screen_top_k=3
)


def draws(positions: int, count: int, sigma: float, seed: int) -> Tensor:
    """Return (positions, count) noise as the mechanism draws it, with one draw per position."""
    rng = SeededRandom(seed)
    return torch.stack([ops.gaussian(count, sigma=sigma, rng=rng) for _ in range(positions)])


def ensemble(seed: int = 0, positions: int = POSITIONS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = 1.2 * torch.randn(positions, VOCAB, generator=generator)
    private = public + 0.8 * torch.randn(MODELS, positions, VOCAB, generator=generator)
    return private, public


def by_hand(private: Tensor, public: Tensor, seed: int, **changes: Any) -> list[Step]:
    """Run Algorithm 1 with the noise that the mechanism draws from the same seed."""
    s = SETTINGS | changes
    noise = draws(len(public), min(s["screen_top_k"], public.shape[1]), s["sigma"], seed)
    arguments = dict(
        order=s["order"],
        beta=s["target_leakage"],
        screen_weight=s["screen_weight"],
        threshold=s["threshold"],
        noise_first=s.get("noise_first", True),
    )
    return [
        algorithm_1(private[:, b], public[b], noise[b], **arguments) for b in range(len(public))
    ]


def propose(mechanism: AdaPMixED, private: Tensor, public: Tensor, seed: int = SEED) -> Ticket:
    return mechanism.propose(private, public, rng=SeededRandom(seed))


def events_of(proposal: Ticket, kind: type) -> list[Any]:
    return [event for event in stated(proposal) if isinstance(event, kind)]
