"""Compute an answer's distribution with 60 digits, and Algorithm 1 in float64 torch.

This is independent of the operators: sums are as in the paper, and weights come from bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import Answer, Mechanism, Ticket
from adapmixed.privacy import Caveat
from adapmixed.rng import SeededRandom

CTX = mpmath.mp.clone()
CTX.dps = 60
mpf = CTX.mpf
Vector = list[mpmath.mpf]


def stated(proposal: Ticket) -> Sequence[Any]:
    """Return the events that an accountant would get, without a charge."""
    return proposal._events


def individual(proposal: Ticket) -> np.ndarray:
    """Return the (N, B) individual charges, without a charge."""
    assert proposal._charges is not None
    return proposal._charges


def settled(proposal: Ticket, active: Any = None) -> Ticket:
    """Return the proposal, made ready for release without a charge."""
    proposal.charge(lambda events, charges: active)
    return proposal


def costs(proposal: Ticket) -> list[Any]:
    """Return the events of a proposal, without their note about a seeded source."""
    events = stated(proposal)
    caveats = [event for event in events if isinstance(event, Caveat)]
    assert caveats == [Caveat(name) for name in ("seeded", "shards", "base")]
    return [event for event in events if not isinstance(event, Caveat)]


def uncharged(proposal: Ticket) -> Answer:
    """Return the answer without a charge, for tests with more queries than a plan allows."""
    return settled(proposal).release()


def answered_from_q(proposal: Ticket) -> Tensor:
    """Return which queries q answers, (B,) bool, which is secret before the charge."""
    public, rows = proposal._proposed.public, proposal._proposed.rows.public
    return torch.zeros(len(rows), dtype=torch.bool) if public is None else public


def losses(proposal: Ticket) -> Tensor:
    """Return AdaPMixED's realised losses, (N, B, K)."""
    found = proposal._proposed.losses
    assert found is not None
    return found


def softmax(logits: Tensor) -> Vector:
    """Return the exact distribution of one row of logits (V,)."""
    values = [mpf(z) for z in logits.double().tolist()]
    top = max(values)
    weights = [CTX.exp(z - top) if z != -mpmath.inf else mpf(0) for z in values]
    total = CTX.fsum(weights)
    return [w / total for w in weights]


def divergence(p: Sequence[mpmath.mpf], q: Sequence[mpmath.mpf], order: float) -> mpmath.mpf:
    """Return D_order(p || q), to which P = Q = 0 adds 0 and P > 0 = Q adds +inf."""
    pairs = [(a, b) for a, b in zip(p, q, strict=True) if a > 0]
    if any(b == 0 for _, b in pairs):
        return mpf("inf")
    eta = mpf(order) - 1
    if eta == int(eta):
        total = CTX.fsum(a * (a / b) ** int(eta) for a, b in pairs)
    else:
        total = CTX.fsum(a * CTX.exp(eta * CTX.log(a / b)) for a, b in pairs)
    return CTX.log(total) / eta


def both_ways(p: Sequence[mpmath.mpf], q: Sequence[mpmath.mpf], order: float) -> mpmath.mpf:
    """Return D<->_order of two distributions."""
    return max(divergence(p, q, order), divergence(q, p, order))


def mix(p: Sequence[mpmath.mpf], q: Sequence[mpmath.mpf], weight: float, rest: float) -> Vector:
    """Return weight p + (1 - weight) q, from the smaller of weight and rest = 1 - weight."""
    w, c = (mpf(weight), 1 - mpf(weight)) if weight <= rest else (1 - mpf(rest), mpf(rest))
    return [w * a + c * b for a, b in zip(p, q, strict=True)]


def mean(rows: Sequence[Sequence[mpmath.mpf]]) -> Vector:
    return [CTX.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def members(proposal: Ticket, b: int) -> tuple[list[Vector], Vector]:
    """Return (p_bar_i of every member, q) at position b, with the weights of the proposal."""
    projection: Any = proposal._proposed.projection
    rows = proposal._proposed.rows  # members do not speak about the tail
    private, q = rows.private, softmax(rows.public[b])
    weights = enumerate(projection.weight[:, b].tolist())
    return [mix(softmax(private[i, b]), q, w, 1.0 - w) for i, w in weights], q


def log_probs(
    mechanism: Mechanism, private: Tensor, public: Tensor, *, seed: int = 0, **shape: Any
) -> Tensor:
    """Return log p of every token as released, (B, V), from one proposal per token and one seed."""
    columns = []
    for token in range(public.shape[1]):
        targets, rng = torch.full((len(public),), token), SeededRandom(seed)
        proposal = mechanism.propose(private, public, targets=targets, rng=rng, **shape)
        columns.append(uncharged(proposal).log_prob)
    return torch.stack(columns, dim=1)


# Algorithm 1 in float64, with one line of code per line of the paper.


@dataclass(frozen=True)
class Step:
    """One query: the screening divergence, whether it passed, p, and every member's loss."""

    divergence: float
    passed: bool
    p: Tensor  # (V,)
    losses: Tensor  # (N,), 0 if the screening failed


def renyi(p: Tensor, q: Tensor, order: float) -> float:
    """Return D_order(p || q) of float64 vectors with q > 0."""
    return float(torch.log((q * (p / q) ** order).sum()) / (order - 1))


def renyi_both(p: Tensor, q: Tensor, order: float) -> float:
    return max(renyi(p, q, order), renyi(q, p, order))


def largest_weight(private: Tensor, public: Tensor, order: float, radius: float) -> float:
    """Return the weight of line 11 of Algorithm 1, by bisection."""
    if renyi_both(private, public, order) <= radius:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        inside = renyi_both(middle * private + (1 - middle) * public, public, order) <= radius
        low, high = (middle, high) if inside else (low, middle)
    return low


def scores(p: Tensor, q: Tensor, weight: float) -> Tensor:
    """Return the scores of line 1, mean_i weight p_i + (1 - weight) q."""
    return (weight * p + (1 - weight) * q).mean(0)


def algorithm_1(
    private: Tensor,
    public: Tensor,
    noise: Tensor,
    *,
    order: float,
    beta: float,
    screen_weight: float,
    threshold: float,
    noise_first: bool = True,
) -> Step:
    """Answer one position: private (N, V), public (V,) logits; noise (k,) by rank of the token."""
    p, q = torch.softmax(private.double(), -1), torch.softmax(public.double(), -1)
    s = scores(p, q, screen_weight)
    top = torch.sort(public.double(), descending=True, stable=True).indices[: len(noise)]
    screened, base = s[top], q[top] / q[top].sum()
    if noise_first:
        screened = (screened + noise).clamp(min=0)
        screened = screened / screened.sum()
    else:  # the order of the authors' program, whose sensitivity is not the stated one
        screened = (screened / screened.sum() + noise).clamp(min=0)
        screened = screened / screened.sum()
    distance = renyi(screened, base, order)
    models = len(p)
    if not distance <= threshold:
        return Step(distance, False, q, torch.zeros(models, dtype=torch.float64))
    bars = []
    for row in p:
        weight = largest_weight(row, q, order, beta * order)
        bars.append(weight * row + (1 - weight) * q)
    total = torch.stack(bars).sum(0)
    mixture = total / models
    losses = [
        renyi_both(mixture, (total - bar) / (models - 1) if models > 1 else q, order)
        for bar in bars
    ]
    return Step(distance, True, mixture, torch.tensor(losses, dtype=torch.float64))
