"""SubMix: its rule as published, and a pair of neighbours whose loss is above its charge."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import pytest
import torch
from exact import log_probs
from mechanism_cases import logits
from torch import Tensor

from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom
from adapmixed_lab.baselines.submix import SubMix, divergence, program_charges

EXAMPLE = SubMix(0.5, 1024)  # with the order of the program's example, 2


def rare_token(vocab: int = 50_257) -> tuple[Tensor, Tensor]:
    """Return logits of 8 members, of which the first pair favours a token of probability 0.001."""
    public = torch.zeros(1, vocab)
    public[0, 0] = math.log(1e-3 / (1 - 1e-3) * (vocab - 1))
    private = public.repeat(8, 1, 1)
    private[:2, 0, 0] = 30.0
    return private, public


def answers(private: Tensor, public: Tensor) -> list[mpmath.mpf]:
    """Return the probability of token 0, and that of each of the others."""
    targets = torch.tensor([0, 1])
    rows = private.repeat(1, 2, 1), public.repeat(2, 1)
    ticket = EXAMPLE.propose(*rows, targets=targets, rng=SeededRandom(0))
    Accountant(1e-5).charge(ticket)
    log_prob = ticket.release().log_prob
    assert log_prob is not None
    return [mpmath.exp(one) for one in log_prob.tolist()]


def test_one_answer_loses_more_than_is_charged_and_more_than_the_whole_budget() -> None:
    """Item 12 of docs/theory/errata.md: the first pair is emptied.

    The program itself gave the same numbers for these rows: the charges of the four pairs, 0.0851
    and three times 0.7774, and the loss.
    """
    private, public = rare_token()
    mixes = EXAMPLE.mixes(private, public.double().softmax(-1))
    charged = program_charges(mixes, EXAMPLE.order)[:, 0].tolist()
    emptied = private.clone()
    emptied[:2] = public
    with mpmath.workdps(30):
        (p, rest), (q, other) = answers(private, public), answers(emptied, public)
        count = public.shape[1] - 1
        loss = max(
            mpmath.log(a**2 / b + count * c**2 / d)
            for a, b, c, d in ((p, q, rest, other), (q, p, other, rest))
        )
    assert float(q) == pytest.approx(1e-3, rel=1e-5)  # all rows are the public one
    assert charged == pytest.approx([0.0851, *[0.7774] * 3], rel=1e-3)
    assert loss > 9 * charged[0] and loss > 1.5 * EXAMPLE.epsilon
    # The divergence from the mean over the other pairs, which is meant, covers it.
    whole, pairs = mixes.mean(0), len(mixes)
    without = (pairs * whole - mixes) / (pairs - 1)
    meant = torch.maximum(divergence(whole, without, 2.0), divergence(without, whole, 2.0))
    assert float(meant[0]) >= float(loss) * (1 - 1e-6)


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


def test_no_guarantee_is_stated() -> None:
    accountant = Accountant(1e-5)
    accountant.charge(EXAMPLE.propose(*logits(4), rng=SeededRandom(0)))
    assert accountant.guarantee().kind == "none" and accountant.guarantee().epsilon is None
    with pytest.raises(ValueError, match="num_models must be at least 2"):
        EXAMPLE.propose(logits(1)[0][:1], logits(1)[1], rng=SeededRandom(0))
    for bad, name in (({"epsilon": 0.0}, "epsilon"), ({"queries": 0}, "queries")):
        with pytest.raises(ValueError, match=f"^{name} must be"):
            replace(EXAMPLE, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^order must be"):
        SubMix(1.0, 1, 1.0)
