"""Texts, mechanisms and direct computations for tests of evaluations."""

from __future__ import annotations

from typing import Any

import torch
from result_cases import DELTA
from torch import Tensor

from adapmixed.evaluation import evaluate
from adapmixed.mechanisms import (
    AdaPMixED,
    Mechanism,
    PMixED,
    PublicOnly,
    Unprotected,
)
from adapmixed.rng import SeededRandom

SCREENED: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.05, threshold=0.3, screen_top_k=4
)

DETERMINISTIC: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
    "adapmixed": AdaPMixED(**SCREENED | dict(screen=None)),
}


def run(ensemble: Any, tokens: list[int], mechanisms: Any = None, **settings: Any) -> Any:
    arguments: dict[str, Any] = dict(delta=DELTA, rng=SeededRandom(0), memory_bytes=1000)
    if mechanisms is None:
        mechanisms = {"public": PublicOnly()}
    return evaluate(ensemble, tokens, mechanisms, **(arguments | settings))


def target_log_probs(ensemble: Any, tokens: list[int], block: int) -> dict[str, Tensor]:
    """Return log q(target) and log mean_i p_i(target) of every scored token, by plain softmax."""
    public_parts, private_parts = [], []
    for start in range(0, len(tokens), block):
        ids = torch.tensor([tokens[start : start + block]])
        private, public = ensemble.logits(ids)
        targets = ids[0, 1:]
        where = torch.arange(len(targets))
        public_parts.append(torch.softmax(public[0, :-1].double(), -1)[where, targets])
        mean = torch.softmax(private[:, 0, :-1].double(), -1).mean(0)
        private_parts.append(mean[where, targets])
    return {"public": torch.cat(public_parts).log(), "unprotected": torch.cat(private_parts).log()}
