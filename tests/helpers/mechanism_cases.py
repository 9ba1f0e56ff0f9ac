"""Mechanisms over three models of six tokens, grids of all ensembles, and distances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Ticket,
    Unprotected,
    UnprotectedPool,
)
from adapmixed.privacy import Event
from adapmixed.rng import SeededRandom
from adapmixed_ext import reference
from adapmixed_lab.baselines import InvisibleInk, NoisyAggregation
from adapmixed_lab.reproduce.published import FixedLoss, PublishedPMixED

SCREENED: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.06, threshold=0.3, screen_top_k=4
)

MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "unprotected-pool": UnprotectedPool(3.0),
    "adapmixed": AdaPMixED(**SCREENED),
    "adapmixed-public-screen": AdaPMixED(**SCREENED | dict(screen="public")),
    "adapmixed-no-screen": AdaPMixED(**SCREENED | dict(screen=None)),
    "adapmixed-add-remove": AdaPMixED(**SCREENED | dict(adjacency="add_remove")),
    "adapmixed-fixed": FixedLoss(**SCREENED),
    "pmixed": PMixED(8.0, 1e-5, 100, 3.0),
    "pmixed-published": PublishedPMixED(8.0, 1e-5, 100, 3.0),
    "pmixed-published-subsampled": PublishedPMixED(8.0, 1e-5, 100, 3.0, sample_rate=0.4),
    "clipped-mixing": ClippedMixing(0.6, 1.7, queries=100),
    "clipped-log-pool": ClippedLogPool(-0.5, 0.5, 1.5, queries=100),
}

BASELINES: dict[str, Mechanism] = {
    "noisy-aggregation": NoisyAggregation(0.1, top_k=4, weight=0.7),
    "invisible-ink": InvisibleInk(0.5, 0.8, queries=100),
}
"""Their formulas are in tests/lab/test_baselines.py."""
MECHANISMS |= BASELINES


EX_POST = "data-dependent, ex-post"
KINDS: dict[str, tuple[str, str | None]] = {
    "public": ("public", None),
    "unprotected": ("none", None),
    "unprotected-pool": ("none", None),
    "adapmixed": (EX_POST, "zero_out"),
    "adapmixed-public-screen": (EX_POST, "zero_out"),
    "adapmixed-no-screen": (EX_POST, "zero_out"),
    "adapmixed-add-remove": (EX_POST, "add_remove"),
    "pmixed-published": ("published", "add_remove"),
    "pmixed-published-subsampled": ("published", "add_remove"),
}
"""Kind and neighbours of what is stated, unless it is fixed, for zero-out."""


def unclipped(private: Tensor, public: Tensor) -> Tensor:
    p, q = private.double().log_softmax(-1), public.double().log_softmax(-1)
    return (q + 3.0 * (p - q).mean(0)).softmax(-1)


FORMULAS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "unprotected-pool": unclipped,
    "clipped-mixing": lambda *rows: reference.clip_project(*rows, lower=0.6, upper=1.7).mean(0),
    "clipped-log-pool": lambda *rows: reference.log_pool(*rows, lower=-0.5, upper=0.5, scale=1.5)[
        0
    ].exp(),
}
"""What is answered from, (B, V), by the logits, (N, B, V) and (B, V), unless weights give it."""

MODELS, VOCAB = 3, 6

every = pytest.mark.parametrize("name", list(MECHANISMS))


class CountingRandom(SeededRandom):
    """A random source that counts its draws."""

    draws = 0

    def reserve(self) -> tuple[Tensor, int]:
        self.draws += 1
        return super().reserve()


def logits(positions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = torch.randn(positions, VOCAB, generator=generator)
    private = public + torch.randn(MODELS, positions, VOCAB, generator=generator)
    return private, public


def propose(
    name: str, positions: int = 12, *, seed: int = 5, rng: Any = None, targets: Any = None
) -> Ticket:
    return MECHANISMS[name].propose(
        *logits(positions), targets=targets, rng=rng or SeededRandom(seed)
    )


def same(events: Sequence[Event], others: Sequence[Event]) -> bool:
    """Return True if two events are equal, arrays included."""

    def plain(event: Event) -> Any:
        fields = vars(event) | {"type": type(event)}
        return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in fields.items()}

    return [plain(e) for e in events] == [plain(e) for e in others]


GRIDS = {
    # tokens, models, values of a logit, K: all (models + 1) rows over all values
    "V2-N1": (2, 1, (-40.0, -3.0, 0.0, 0.5, 3.0), None),
    "V2-N2": (2, 2, (-3.0, 0.0, 0.5, 3.0), None),
    "V2-N3": (2, 3, (-3.0, 0.0, 3.0), None),
    "V3-N2": (3, 2, (-2.0, 0.0, 4.0), None),
    "tail": (3, 2, (-90.0, 0.0, 90.0), None),  # tokens about which no member speaks
    "active": (4, 2, (-2.0, 3.0), 2),
}


def everything(grid: str) -> tuple[Tensor, Tensor, Tensor, int | None]:
    """Return private (N, B, V) and public (B, V) logits of all ensembles, all rows, and K.

    The first logit is 0. That loses no distribution, because only differences count.
    """
    vocab, models, values, active = GRIDS[grid]
    rows = [(0.0, *rest) for rest in product(values, repeat=vocab - 1)]
    ensembles = torch.tensor(list(product(rows, repeat=models + 1)))
    private = ensembles[:, 1:].transpose(0, 1).contiguous()
    return private, ensembles[:, 0].contiguous(), torch.tensor(rows), active


def neighbours(private: Tensor, public: Tensor, adjacency: str, rows: Tensor) -> list[Tensor]:
    """Return the ensembles without one member, or with another row in a member's place."""
    result = []
    for i in range(len(private)):
        others = torch.cat((private[:i], private[i + 1 :]))
        if adjacency == "add_remove":
            result.append(others if len(others) else public[None])
            continue
        for row in [public] if adjacency == "zero_out" else rows:
            changed = private.clone()
            changed[i] = row
            result.append(changed)
    return result


def both_ways(p: Tensor, q: Tensor, order: float) -> Tensor:
    """Return D↔_order, (B,), of log-probabilities (B, V)."""
    return torch.maximum(*reference.renyi_divergence(p, q, order))[:, 0]


def hockey_stick(p: Tensor, q: Tensor, epsilon: float) -> float:
    """Return the largest hockey stick of log-probabilities (B, V), the larger of both ways."""
    ratio = torch.exp(torch.tensor(epsilon))
    both = ((a.exp() - ratio * b.exp()).clamp(min=0).sum(1) for a, b in ((p, q), (q, p)))
    return max(float(stick.max()) for stick in both)
