"""Tables of logits, random ones and edge cases, and their diagnostics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from fake_ensemble import FakeEnsemble
from result_cases import NOISY
from torch import Tensor

from adapmixed.evaluation import Diagnosis, Evaluation, evaluate
from adapmixed.mechanisms import AdaPMixED, Mechanism, PMixED
from adapmixed.rng import SeededRandom

INF = math.inf
DELTA = 1e-5
MIXING: dict[str, Mechanism] = {
    "noisy": NOISY,
    "unscreened": AdaPMixED(order=3.0, target_leakage=0.05, screen=None),
    "always screened": AdaPMixED(order=3.0, target_leakage=0.05, screen="public", threshold=0.0),
    "wide": AdaPMixED(order=2.0, target_leakage=50.0, screen=None),
    "pmixed": PMixED(8.0, DELTA, 10_000, 6.0),
}


class TableEnsemble(FakeEnsemble):
    """An ensemble whose logits (N, V, V) and (V, V) depend on the token read."""

    def __init__(self, private: Tensor, public: Tensor) -> None:
        super().__init__(len(private), public.shape[-1])
        self.private, self.public = private, public

    def logits(self, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.private[:, ids], self.public[ids]


def tables(seed: int, models: int = 3, vocab: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    public = torch.randn(vocab, vocab, generator=generator)
    return public + torch.randn(models, vocab, vocab, generator=generator), public


def random(seed: int) -> tuple[Tensor, Tensor]:
    return tables(seed)


def far(seed: int) -> tuple[Tensor, Tensor]:
    private, public = tables(seed)
    return 40.0 * private, public


def equal(seed: int) -> tuple[Tensor, Tensor]:
    """Return logits with λ = 1 everywhere."""
    private, public = tables(seed)
    return public.expand_as(private).clone(), public


def one_apart(seed: int) -> tuple[Tensor, Tensor]:
    private, public = equal(seed)
    private[0] = 30.0 * tables(seed + 100)[0][0]
    return private, public


def masked(seed: int) -> tuple[Tensor, Tensor]:
    """Return logits with p = 0 for some tokens in all models, and for some in all private ones."""
    private, public = tables(seed)
    private[:, :, 0] = public[:, 0] = -INF
    private[:, :3, 1] = -INF
    private[0, :, 2] = -INF
    return private, public


def masked_public(seed: int) -> tuple[Tensor, Tensor]:
    """Return logits with q = 0 < p_j for some tokens, so that such a model has weight 0."""
    private, public = tables(seed)
    public[:4, 3] = -INF
    private[1, :, 3] = -INF
    return private, public


def single(seed: int) -> tuple[Tensor, Tensor]:
    return tables(seed, models=1)


TABLES: list[Callable[[int], tuple[Tensor, Tensor]]] = [
    random, far, equal, one_apart, masked, masked_public, single,
]  # fmt: skip


def diagnosed(
    ensemble: Any, mechanisms: dict[str, Mechanism], tokens: list[int], **changed: Any
) -> dict[str, Evaluation]:
    settings: dict[str, Any] = dict(
        delta=DELTA, rng=SeededRandom(5), block=20, memory_bytes=7, diagnostics=True
    )
    found = evaluate(ensemble, tokens, mechanisms, **(settings | changed))
    return {one.name: one for one in found}


def diagnosis(evaluation: Evaluation) -> Diagnosis:
    assert evaluation.diagnosis is not None
    return evaluation.diagnosis
