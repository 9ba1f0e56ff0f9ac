"""SubMix: its rule as published, and a pair of neighbours whose loss is above its charge."""

from __future__ import annotations

import math

import pytest
import torch
from exact import log_probs, settled
from mechanism_cases import logits
from torch import Tensor

from adapmixed.rng import SeededRandom
from adapmixed_lab.baselines.submix import SubMix, divergence

EXAMPLE = SubMix(0.5, 1024)  # with the order of the program's example, 2


def rare_token(vocab: int = 50_257) -> tuple[Tensor, Tensor]:
    """Return logits of 8 members, of which the first pair favours a token of probability 0.001."""
    public = torch.zeros(1, vocab)
    public[0, 0] = math.log(1e-3 / (1 - 1e-3) * (vocab - 1))
    private = public.repeat(8, 1, 1)
    private[:2, 0, 0] = 30.0
    return private, public


def answer(private: Tensor, public: Tensor) -> Tensor:
    """Return the distribution of the answer, (V,)."""
    ticket = settled(EXAMPLE.propose(private, public, rng=SeededRandom(0)))
    return ticket._distribution.probabilities()[0]


def largest(p: Tensor, q: Tensor) -> Tensor:
    """Return the larger divergence of order 2 of both directions."""
    return torch.maximum(divergence(p, q, 2.0), divergence(q, p, 2.0))


def program_charges(mixes: Tensor, order: float) -> list[float]:
    """Return what the program takes from each pair's budget for the answer at position 0.

    It divides by `len(P_out)`, the number of tokens, as if that were the number of pairs.
    """
    whole, tokens = mixes.mean(0), mixes.shape[-1]
    without = (whole - mixes / tokens) * (tokens / (tokens - 1))
    both = divergence(without, whole, order), divergence(whole, mixes, order)
    return torch.maximum(*both)[:, 0].tolist()


def test_one_answer_loses_more_than_is_charged_and_more_than_the_whole_budget() -> None:
    """Item 12 of docs/theory/errata.md: the first pair is emptied.

    The program itself gave the same numbers for these rows: the charges of the four pairs, 0.0851
    and three times 0.7774, and the loss.
    """
    private, public = rare_token()
    mixes = EXAMPLE.mixes(private, public.double().softmax(-1))
    charged = program_charges(mixes, EXAMPLE.order)
    emptied = private.clone()
    emptied[:2] = public
    here, there = answer(private, public), answer(emptied, public)
    assert float(there[0]) == pytest.approx(1e-3, rel=1e-5)  # all rows are the public one
    loss = float(largest(here, there))
    assert loss == pytest.approx(math.log(float((here**2 / there).sum())), rel=1e-12)
    assert charged == pytest.approx([0.0851, *[0.7774] * 3], rel=1e-3)
    assert loss > 9 * charged[0] and loss > 1.5 * EXAMPLE.epsilon
    # The divergence from the mean over the other pairs, which is meant, covers it.
    whole, pairs = mixes.mean(0), len(mixes)
    meant = largest(whole, (pairs * whole - mixes) / (pairs - 1))
    assert float(meant[0]) >= loss * (1 - 1e-6)


def test_the_rule_is_the_programs() -> None:
    """With its loop over powers of 0.93, for a small budget and a large one."""
    private, public = logits(6)
    q = public.double().softmax(-1)
    p, other = (row.double().softmax(-1) for row in private[:2])
    for mechanism in (EXAMPLE, SubMix(600.0, 100, 3.0)):
        expected = q.clone()
        for b in range(6):
            share, cost = 1.0, math.inf
            while cost > mechanism.epsilon / mechanism.queries:
                share *= 0.93
                found = [q[b] + share * (one[b] - q[b]) for one in ((p + other) / 2, p, other)]
                cost = max(float(divergence(found[0], o, mechanism.order)) for o in found[1:])
            expected[b] = found[0]
        torch.testing.assert_close(log_probs(mechanism, private, public).exp(), expected)
    near = private[:2].clone()
    near[:, :, 0] = 60.0  # beyond e^5 of q, to which rows are clipped
    mixed = SubMix(1e4, 1).mixes(near, q)[0]
    assert bool((mixed / q <= math.exp(5) * 1.001).all()) and float(mixed[0, 0]) > 0.9
    with pytest.raises(ValueError, match="num_models must be at least 2"):
        EXAMPLE.propose(private[:1], public, rng=SeededRandom(0))
