"""What several audits ask of a mechanism, divergences in float64, and bounds from counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import scipy  # it loads scipy.stats on its first use
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
CONFIDENCE = 0.999
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
    token = uncharged(mechanism.propose(private, public, rng=SeededRandom(0)))._distribution
    return np.asarray(token.probabilities().numpy(), dtype=np.float64)


def drawn(
    mechanism: Mechanism, private: Tensor, public: Tensor, count: int, rng: RandomSource
) -> tuple[Tensor, Tensor]:
    """Return `count` answers to one query with rows (N, 1, V) and (1, V).

    Returns:
        (tokens (count,) int64, whether the public distribution alone answered (count,) bool).
    """
    models, _, vocab = private.shape
    tokens, flags = [], []
    for start in range(0, count, CHUNK):
        chunk = min(count - start, CHUNK)
        rows = private.expand(models, chunk, vocab), public.expand(chunk, vocab)
        answer = uncharged(mechanism.propose(*rows, rng=rng)).release()
        assert answer.tokens is not None
        tokens.append(answer.tokens)
        flags.append(answer.public)
    return torch.cat(tokens), torch.cat(flags)


def realised(mechanism: Mechanism, private: Tensor, public: Tensor) -> LeaveOneOutLoss:
    """Return the realised losses of an AdaPMixED that answers all queries."""
    events = mechanism.propose(private, public, rng=SeededRandom(0))._events
    (event,) = (cost for cost in events if isinstance(cost, LeaveOneOutLoss))
    return event


def charged(mechanism: Mechanism, private: Tensor, public: Tensor) -> Array:
    """Return (B,), the individual charges of member 0."""
    charges = mechanism.propose(private, public, rng=SeededRandom(0))._charges
    assert charges is not None
    first: Array = charges[0]
    return first


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


# Confidence bounds and tests from counts.


def proportion(hits: int, draws: int, confidence: float) -> tuple[float, float]:
    """Return the Clopper–Pearson interval; each end alone holds with this confidence."""
    low = scipy.stats.beta.ppf(1 - confidence, hits, draws - hits + 1) if hits > 0 else 0.0
    high = scipy.stats.beta.ppf(confidence, hits + 1, draws - hits) if hits < draws else 1.0
    return float(low), float(high)


def _ends(here: tuple[int, int], there: tuple[int, int], confidence: float) -> tuple[float, float]:
    """Return the least proportion here and the largest there, each with half of the error."""
    each = 1 - (1 - confidence) / 2
    return proportion(*here, each)[0], proportion(*there, each)[1]


def least_epsilon(
    here: tuple[int, int], there: tuple[int, int], delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound on ε at this δ, 0 if the counts show nothing.

    From P <= e^ε Q + δ, with both ends at half the error. The event must be chosen before the
    draws.

    Args:
        here, there: (hits, draws) of the event in the two worlds.
    """
    low, high = _ends(here, there, confidence)
    return math.log((low - delta) / high) if low - delta > high else 0.0


def least_shift(
    here: tuple[int, int], there: tuple[int, int], confidence: float = CONFIDENCE
) -> float:
    """Return how far apart N(0, 1) and N(shift, 1) must at least be to allow for this event."""
    low, high = _ends(here, there, confidence)
    return max(0.0, float(scipy.stats.norm.ppf(low) - scipy.stats.norm.ppf(high)))


def chi_square(counts: list[int], shares: list[float]) -> tuple[float, int]:
    """Return (statistic, degrees of freedom); rare tokens share cells of >= 25 expected draws.

    Which tokens share a cell depends on the shares and their places alone, never on their counts.
    """
    draws, cells = sum(counts), []
    seen, expected = 0.0, 0.0
    for probability, count in sorted(zip(shares, counts, strict=True), key=lambda pair: pair[0]):
        seen, expected = seen + count, expected + draws * probability
        if expected >= 25:
            cells.append((seen, expected))
            seen, expected = 0.0, 0.0
    if expected > 0 and cells:
        cells[-1] = (cells[-1][0] + seen, cells[-1][1] + expected)
    return sum((seen - e) ** 2 / e for seen, e in cells), len(cells) - 1


def chi_square_limit(freedom: int) -> float:
    """Return the value that the statistic of `chi_square` stays below with `CONFIDENCE`.

    Counts of few expected draws have longer tails than normal ones, so only half of the error is
    used. One or two cells of 25 expected draws, beside a large one, are above the limit for 0.001
    with probability 0.00092 at most; more cells or draws less often.
    """
    return float(scipy.stats.chi2.isf((1 - CONFIDENCE) / 2, freedom))


def one_run_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of so many right guesses under (epsilon, delta)-DP.

    Theorem 5.2 of Steinke, Nasr and Jagielski 2023. Each of m canaries is in or out by a fair coin
    of its own. From the output, r of the coins are guessed. The mechanism is (ε, δ)-DP if one coin
    is turned. With W ~ Binomial(r, e^ε/(1 + e^ε)),

        P[v or more are right] <= P[W >= v] + 2 m δ max_{i = 1..v} P[v > W >= v - i] / i.

    Args:
        canaries: m >= guesses.
        guesses: r, fixed in advance; the attacker abstains on the other coins.
        right: v in [0, r].
    """
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(scipy.stats.binom.sf(right - 1, guesses, accuracy))
    if delta == 0 or right == 0:
        return tail
    # Terms further below vanish in float64, so the maximum is not among them.
    reach = right - guesses * accuracy + 40 * math.sqrt(guesses * accuracy * (1 - accuracy)) + 1000
    steps = np.arange(1, max(1, min(right, math.ceil(reach))) + 1)
    below = np.cumsum(scipy.stats.binom.pmf(right - steps, guesses, accuracy))
    return min(1.0, tail + 2 * canaries * delta * float((below / steps).max()))


def one_run_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return a lower bound on ε at this δ from `right` guesses, 0 if they show nothing.

    See `one_run_p_value`.
    """

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    return last(refuted) if refuted(0.0) else 0.0
