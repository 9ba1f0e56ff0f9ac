"""PMixED with a budget of one query, and its answers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from exact import all_log_probs
from torch import Tensor

from adapmixed.mechanisms import PMixED, Proposal
from adapmixed.privacy import c_alpha
from adapmixed.rng import SeededRandom

DELTA = 1e-5


def budget(order: float, per_query: float, queries: int = 1, **settings: Any) -> PMixED:
    """The mechanism whose Rényi budget of one query is ``per_query``."""
    epsilon = c_alpha(order, DELTA) + queries * per_query
    return PMixED(epsilon, DELTA, queries, order, **settings)


def rows(masses: list[list[float]]) -> Tensor:
    """float32 logits (B, V) of probability rows."""
    return torch.tensor(masses, dtype=torch.float64).log().float()


def answer(mechanism: PMixED, private: Tensor, public: Tensor, seed: int = 0) -> Proposal:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mechanism.propose(private, public, rng=SeededRandom(seed))


def log_probs(mechanism: PMixED, private: Tensor, public: Tensor, seed: int = 0) -> Tensor:
    def released(targets: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            proposal = mechanism.propose(private, public, targets=targets, rng=SeededRandom(seed))
        log_prob = proposal.release().log_prob
        assert log_prob is not None
        return log_prob

    return all_log_probs(released, public.shape[-1], len(public))
