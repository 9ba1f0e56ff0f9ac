"""An evaluation with every kind of total on a tiny table of logits, with or without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fake_ensemble import FakeEnsemble

from adapmixed.evaluation import Evaluation, evaluate, loop
from adapmixed.mechanisms import (
    AdaPMixED,
    ClippedLogPool,
    ClippedMixing,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.privacy.composition import ShardBudget
from adapmixed.rng import SecureRandom, SeededRandom

DELTA = 1e-5
BLOCK, QUERIES = 20, 76
NOISY = AdaPMixED(order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.05, threshold=0.3,
                  screen_top_k=4)  # fmt: skip
MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "noisy": NOISY,
    "pmixed": PMixED(8.0, DELTA, QUERIES, 6.0),
    "pool": ClippedLogPool(-0.5, 0.5, queries=QUERIES),
    "box": ClippedMixing(0.8, 1.5, queries=QUERIES),
    "budgeted": ClippedMixing(0.5, 2.0, order=4.0),
}
EPSILONS = {"budgeted": ShardBudget(0.05, 4.0).epsilon(DELTA)}
"""Budget of every shard, which some shards spend before the end."""


def stream(length: int, seed: int = 1, vocab: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()


def answer(
    result: Path | None = None,
    *,
    rng: SecureRandom | SeededRandom | None = None,
    ensemble: FakeEnsemble | None = None,
    length: int = 100,
    save_seconds: float = 0.0,
    **changed: Any,
) -> list[Evaluation]:
    settings: dict[str, Any] = dict(
        tokens=stream(length),
        mechanisms=MECHANISMS,
        queries=QUERIES,
        delta=DELTA,
        rng=SeededRandom(3) if rng is None else rng,
        block=BLOCK,
        epsilon=EPSILONS,
        memory_bytes=12,
        result=result,
    )
    with patch.object(loop, "SAVE_SECONDS", save_seconds):
        return evaluate(ensemble or FakeEnsemble(), **(settings | changed))  # type: ignore[arg-type]


def numbers(evaluations: list[Evaluation]) -> list[Any]:
    """Return all numbers but the times."""
    return [
        (e.name, e.perplexity, e.queries, e.guarantee, e.screened, e.curve, e.perplexities,
         dict(e.breakdown))
        for e in evaluations
    ]  # fmt: skip
