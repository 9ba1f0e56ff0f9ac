"""Ensembles on which AdaPMixED screens some queries, and Algorithm 1 computed by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from exact import stated
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import AdaPMixED, Ticket
from adapmixed.rng import SeededRandom
from adapmixed_ext import reference

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


class Steps(NamedTuple):
    """The screening divergence and whether it passed, (B,), p, (B, V), and the losses, (N, B)."""

    divergence: Tensor
    passed: Tensor
    p: Tensor
    losses: Tensor  # 0 if the screening failed


def by_hand(
    private: Tensor, public: Tensor, seed: int, noise_first: bool = True, **changes: Any
) -> Steps:
    """Run Algorithm 1 with the noise that the mechanism draws from the same seed.

    noise_first: else scores are re-scaled before, as in the authors' program, whose sensitivity is
        not the stated one.
    """
    s = SETTINGS | changes
    order, weight, rows = s["order"], s["screen_weight"], (private, public)
    top_k = min(s["screen_top_k"], public.shape[1])
    noise = draws(len(public), top_k, s["sigma"], seed)
    if not noise_first:
        scores = reference.mixture(*rows, torch.full(private.shape[:2], weight))
        noise *= scores.gather(1, public.topk(top_k).indices).sum(-1, keepdim=True)
    screened = dict(weight=weight, order=order, threshold=s["threshold"], top_k=top_k)
    divergence, passed = reference.screen(*rows, noise, **screened)
    weights = reference.project(*rows, order=order, radius=s["target_leakage"] * order) * passed
    losses = reference.leave_one_out(*rows, weights, orders=order)[..., 0]
    return Steps(divergence, passed, reference.mixture(*rows, weights), losses)


def propose(mechanism: AdaPMixED, private: Tensor, public: Tensor, seed: int = SEED) -> Ticket:
    return mechanism.propose(private, public, rng=SeededRandom(seed))


def events_of(proposal: Ticket, kind: type) -> list[Any]:
    return [event for event in stated(proposal) if isinstance(event, kind)]
