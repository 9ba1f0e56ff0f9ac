"""Mechanisms that answer three models of six tokens, and their proposals."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
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
)
from adapmixed.privacy import Event
from adapmixed.rng import SeededRandom
from adapmixed_lab.reproduce.published import PublishedPMixED

SCREENED: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.06, threshold=0.3, screen_top_k=4
)

MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "adapmixed": AdaPMixED(**SCREENED),
    "adapmixed-public-screen": AdaPMixED(**SCREENED | dict(screen="public")),
    "adapmixed-no-screen": AdaPMixED(**SCREENED | dict(screen=None)),
    "adapmixed-add-remove": AdaPMixED(**SCREENED | dict(adjacency="add_remove")),
    "adapmixed-fixed": AdaPMixED(**SCREENED | dict(loss="fixed")),
    "pmixed": PMixED(8.0, 1e-5, 100, 3.0),
    "clipped-mixing": ClippedMixing(0.6, 1.7, queries=100),
    "clipped-log-pool": ClippedLogPool(-0.5, 0.5, 1.5, queries=100),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that its bound is not valid
    MECHANISMS["pmixed-published"] = PublishedPMixED(8.0, 1e-5, 100, 3.0)
    MECHANISMS["pmixed-published-subsampled"] = PublishedPMixED(
        8.0, 1e-5, 100, 3.0, sample_rate=0.4
    )

MODELS, VOCAB = 3, 6

every = pytest.mark.parametrize("name", list(MECHANISMS))


class CountingRandom(SeededRandom):
    """A random source that counts its draws."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.draws = 0

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
