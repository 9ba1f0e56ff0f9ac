"""What several audits ask of a mechanism, and divergences as sums in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapmixed.mechanisms import Mechanism, Ticket
from adapmixed.privacy import Accountant, LeaveOneOutLoss
from adapmixed.rng import SeededRandom
from adapmixed_ext.types import RandomSource

Array = NDArray[np.float64]
FAR = 30.0
"""The largest logit. It is beyond every clip, which puts a member at a corner of its box."""
CHUNK = 1 << 14
"""Answers that are drawn together; what a seed draws depends on it."""


def neighbour(private: Tensor, public: Tensor, other: Tensor, adjacency: str) -> Tensor:
    """Return the ensembles without member 0, or with another one in its place.

    Args:
        adjacency: "zero_out": member 0 answers as an emptied one. "replace_one": another member
            takes its place. "add_remove": only the others are left, and the mechanism divides by
            their number, as AdaPMixED's leave-one-out does.
    """
    if adjacency == "add_remove":
        return private[1:] if len(private) > 1 else public[None]
    changed = private.clone()
    changed[0] = public if adjacency == "zero_out" else other
    return changed


def uncharged(ticket: Ticket) -> Ticket:
    """Make a ticket releasable without charging anybody, and return it.

    Attacks ask more often than any plan allows.
    """
    ticket.charge(lambda events, charges: None)
    return ticket


def stated_epsilon(ticket: Ticket, delta: float, adjacency: str) -> float:
    """Return the ε that an accountant states which is charged this ticket alone."""
    accountant = Accountant(delta, adjacency=adjacency)
    accountant.charge(ticket)
    epsilon = accountant.guarantee().epsilon
    assert epsilon is not None
    return epsilon


def distribution(mechanism: Mechanism, private: Tensor, public: Tensor) -> Array:
    """Return (B, V), the probabilities that a mechanism draws from."""
    found = uncharged(mechanism.propose(private, public, rng=SeededRandom(0)))._distribution
    return np.asarray(found.probabilities().numpy(), dtype=np.float64)


def drawn(
    mechanism: Mechanism, private: Tensor, public: Tensor, count: int, rng: RandomSource
) -> tuple[Tensor, Tensor]:
    """Return `count` answers to one query with rows (N, 1, V) and (1, V).

    Returns:
        (tokens (count,) int64, whether the public distribution alone answered (count,) bool).
    """
    models, _, vocab = private.shape
    tokens, alone = [], []
    for start in range(0, count, CHUNK):
        now = min(count - start, CHUNK)
        rows = private.expand(models, now, vocab), public.expand(now, vocab)
        answer = uncharged(mechanism.propose(*rows, rng=rng)).release()
        assert answer.tokens is not None
        tokens.append(answer.tokens)
        alone.append(answer.public)
    return torch.cat(tokens), torch.cat(alone)


def realised(mechanism: Mechanism, private: Tensor, public: Tensor) -> LeaveOneOutLoss:
    """Return the realised losses of an AdaPMixED that answers all queries."""
    events = mechanism.propose(private, public, rng=SeededRandom(0))._events
    (event,) = (one for one in events if isinstance(one, LeaveOneOutLoss))
    return event


def charged(mechanism: Mechanism, private: Tensor, public: Tensor) -> Array:
    """Return (N, B), the individual charges of the members."""
    charges = mechanism.propose(private, public, rng=SeededRandom(0))._charges
    assert charges is not None
    return charges


def renyi(p: Array, q: Array, order: float) -> Array:
    """Return D_order(p ‖ q) over the last axis.

    It is formed from Σ q f(p/q) with f >= 0, so that little cancels.
    """
    ratio = p / np.where(q > 0, q, 1.0)
    excess = np.expm1(order * np.log(np.maximum(ratio, 1e-300))) - order * (ratio - 1)
    terms = np.where(q > 0, q * excess, np.where(p > 0, np.inf, 0.0))
    return np.asarray(np.log1p(terms.sum(-1)) / (order - 1))


def both_ways(p: Array, q: Array, order: float) -> Array:
    """Return the larger divergence of both directions."""
    larger: Array = np.maximum(renyi(p, q, order), renyi(q, p, order))
    return larger


def hockey_stick(p: Array, q: Array, epsilon: float | Array) -> Array:
    """Return Σ (p - e^ε q)_+ over the last axis, the larger of both directions."""
    forward = np.maximum(0.0, p - np.exp(epsilon) * q).sum(-1)
    backward = np.maximum(0.0, q - np.exp(epsilon) * p).sum(-1)
    larger: Array = np.maximum(forward, backward)
    return larger


def last(holds: Callable[[float], bool]) -> float:
    """Return the last number >= 0 up to which something holds, by doubling and bisection."""
    low, high = 0.0, 1.0
    while holds(high):
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@contextmanager
def one_thread() -> Iterator[None]:
    """Run with one thread: calls are small, and more threads would wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
