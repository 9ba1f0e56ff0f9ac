"""Adaptive trees under budgets of every shard: an adversary whose answers differ at every node.

The trees are small enough to be enumerated to the last leaf, so that the distribution of a whole
transcript is exact. The charges are written out (`Adversary`), or a mechanism answers each node as
a generator would (`Tree`): it proposes, and the branch's accountant charges and so decides which
members contribute. The tokens follow the distribution that the ticket would release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import ClippedMixing, Mechanism, NextToken, Origin, Rows
from adapmixed.privacy import Accountant, LeaveOneOutLoss
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.events import Pay
from adapmixed.rng import SeededRandom
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit.search import Array, both_ways

DELTA = 1e-5
"""δ of the accountants of all trees."""

History = tuple[int, ...]
"""The tokens answered so far."""
Leaves = dict[History, float]


@dataclass(frozen=True)
class Adversary:
    """An adversary whose N members answer in a box around q, differently at every node."""

    seed: int
    models: int
    vocab: int
    lower: float
    upper: float

    def node(self, history: History) -> tuple[Array, Array]:
        """Return q (V,) and p̄ (N, V); every p̄_i mixes q with a corner of the box."""
        rng = np.random.default_rng([self.seed, len(history), *history])
        q = rng.dirichlet(np.full(self.vocab, 0.7))
        bars = []
        for _ in range(self.models):
            raised = rng.random(self.vocab) < rng.choice([0.2, 0.5])
            ratio = np.where(raised, self.upper, self.lower)
            total = float(ratio @ q)
            # Move towards the side of the box that has room, until the sum is 1.
            bound = self.lower if total > 1 else self.upper
            room = bound - ratio
            ratio = ratio + room * (1 - total) / float(room @ q)
            bars.append(q * ratio)
        return q, np.array(bars)


def charge_of(
    q: Array, bars: Array, lower: float, order: float, models: int | None = None
) -> Array:
    """Return the charges of ClippedMixing by the formula of docs/theory/per-shard-budgets.md.

    Args:
        models: N; None: the number of rows in `bars`.
    """
    models = models or len(bars)
    base = ((models - 1) * lower + 1) / models
    own = ((models - 1) * lower + bars / q) / models

    def f(x: Array) -> Array:
        powers: Array = x**order
        return powers - 1 - order * (x - 1)

    forward = (q * base * f(own / base)).sum(1)
    backward = (q * own * f(base / own)).sum(1)
    charges: Array = np.log1p(np.maximum(forward, backward)) / (order - 1)
    return charges


class Written:
    """A ticket with given costs for `Accountant.charge`.

    Attributes:
        mechanism: the mechanism that the charges belong to.
        active: (N,) bool, the members that the accountant has charged.
    """

    origin = Origin(None, ())

    def __init__(self, mechanism: ClippedMixing, charges: Array) -> None:
        self.mechanism, self.num_models, self._charges = mechanism, len(charges), charges[:, None]
        self.active = np.zeros(len(charges), dtype=np.bool_)

    def charge(self, pay: Pay) -> None:
        """Have the charges paid, and keep which members can pay."""
        active = pay((), self._charges)
        assert active is not None
        self.active = active[:, 0]


def enumerated(
    depth: int, epsilon: float, answer: Callable[[History, Accountant], Iterable[float]]
) -> dict[History, tuple[float, Accountant]]:
    """Return the probability and the accountant of every transcript under a budget of every shard.

    Args:
        depth: number of answers.
        epsilon: of the budget, at `DELTA`.
        answer: charges the answer after a history, and returns the probability of every token.
    """
    level: dict[History, tuple[float, Accountant]] = {(): (1.0, Accountant(DELTA, epsilon=epsilon))}
    for _ in range(depth):
        below = {}
        for history, (mass, before) in level.items():
            # Each branch goes on with an accountant of its own.
            after = Accountant.from_state(before.state())
            for token, p in enumerate(answer(history, after)):
                below[(*history, token)] = (mass * p, after)
        level = below
    return level


def divergence(p: Leaves, q: Leaves, order: float) -> float:
    """Return the larger of D_order(p ‖ q) and D_order(q ‖ p), of distributions of transcripts."""
    here, there = np.array(list(p.values())), np.array([q[history] for history in p])
    return float(both_ways(here, there, order))


def leaves(
    adversary: Adversary, depth: int, amount: float, emptied: int | None, order: float
) -> Leaves:
    """Return the distribution of the transcript under a budget of every shard.

    Args:
        adversary: the queries and their answers.
        depth: number of answers.
        amount: of the budget, in Rényi divergence of this order.
        emptied: a member that answers q throughout, or None.
    """
    mechanism = ClippedMixing(adversary.lower, adversary.upper, order=order)

    def answer(history: History, accountant: Accountant) -> Iterable[float]:
        q, bars = adversary.node(history)
        charges = charge_of(q, bars, adversary.lower, order)
        if emptied is not None:
            bars[emptied], charges[emptied] = q, 0.0
        written = Written(mechanism, charges)
        accountant.charge(written)
        found: list[float] = np.where(written.active[:, None], bars, q).mean(0).tolist()
        return found

    epsilon = ShardBudget("renyi", amount, order).epsilon(DELTA)
    return {h: mass for h, (mass, _) in enumerated(depth, epsilon, answer).items()}


def largest_divergence(adversary: Adversary, depth: int, amount: float, order: float) -> float:
    """Return the largest divergence over both directions and the emptied member."""
    here = leaves(adversary, depth, amount, None, order)
    emptied = (leaves(adversary, depth, amount, i, order) for i in range(adversary.models))
    return max(divergence(here, there, order) for there in emptied)


Stages = list[list[float]]
"""The losses at each order, for every stage."""
Paths = list[tuple[float, float, Stages]]


def two_stage_paths(high: float, low: float, delta: float) -> Paths:
    """Return histories of an adaptive mechanism, (P, Q, losses at both orders per stage).

    Stage 1 is tight for the high order: an atom of P-mass high δ whose ratio is 50. If it does not
    occur, stage 2 is tight for the low order: an atom of P-mass low δ and ratio 1e6.
    """

    def stage(mass: float, ratio: float) -> tuple[Array, Array, list[float]]:
        p, q = np.array([mass, 1 - mass]), np.array([mass / ratio, 1 - mass / ratio])

        def one_way(a: Array, b: Array, order: float) -> float:
            return math.log(float(np.sum(a**order * b ** (1 - order)))) / (order - 1)

        return p, q, [max(one_way(p, q, a), one_way(q, p, a)) for a in (high, low)]

    p1, q1, loss1 = stage(high * delta, 50.0)
    p2, q2, loss2 = stage(low * delta, 1e6)
    paths: Paths = [(float(p1[0]), float(q1[0]), [loss1])]
    for outcome in range(2):
        mass = float(p1[1] * p2[outcome]), float(q1[1] * q2[outcome])
        paths.append((*mass, [loss1, loss2]))
    return paths


_Path = TypeVar("_Path")


def excess(paths: Sequence[tuple[float, float, _Path]], charge: Callable[[_Path], float]) -> float:
    """Return sup_S P(S) - ∫_S e^{ε(h)} dQ, or the same with P and Q exchanged if it is larger.

    Args:
        paths: (P, Q, h) of every history h.
        charge: ε(h).
    """
    charged = [(p, q, math.exp(charge(history))) for p, q, history in paths]
    forward = math.fsum(max(0.0, p - ratio * q) for p, q, ratio in charged)
    return max(forward, math.fsum(max(0.0, q - ratio * p) for p, q, ratio in charged))


def accounted(history: Stages, orders: tuple[float, ...], delta: float) -> float:
    """Return the accountant's ε of one member's history, with δ split over the orders."""
    losses = np.array([history], dtype=np.float64)
    event = LeaveOneOutLoss(orders, losses, "add_remove")
    epsilon = Accountant(delta).add(event).guarantee().epsilon
    assert epsilon is not None
    return epsilon


FAR = 30.0
"""A logit beyond every clip, which puts a member at a corner of its box."""


@dataclass(frozen=True)
class Understated(Mechanism):
    """A control: a mechanism of which the accountant is told only a part of every charge.

    Attributes:
        inner: the mechanism.
        told: the fraction of every charge that the accountant is told.
    """

    name: ClassVar[str] = "understated"

    inner: Mechanism
    told: float

    @property
    def measure(self) -> tuple[str, float | None] | None:
        """The measure of the inner mechanism."""
        return self.inner.measure

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        prepared = self.inner._prepare(rows, rng)
        assert prepared.charges is not None
        return replace(prepared, charges=self.told * prepared.charges)


@dataclass(frozen=True)
class Tree:
    """An adversary whose queries, and their shapes, depend on the answers so far.

    Attributes:
        mechanism: answers the queries; it has a measure for its individual charges.
        budget: of every shard.
        shapes: (temperature, top_k) of the rows; the history decides which pair a query uses.
    """

    mechanism: Mechanism
    seed: int
    models: int
    vocab: int
    depth: int
    budget: ShardBudget
    shapes: tuple[tuple[float, int | None], ...] = ((1.0, None),)

    def node(self, history: History) -> tuple[Tensor, Tensor]:
        """Return (private (N, V), public (V,)) logits of the query after this history."""
        rng = np.random.default_rng([self.seed, len(history), *history])
        public = np.log(rng.dirichlet(np.full(self.vocab, 4.0)))
        raised = rng.random((self.models, self.vocab)) < rng.choice([0.2, 0.5, 0.8])
        private = public + np.where(raised, FAR, -FAR)
        return torch.from_numpy(private).float(), torch.from_numpy(public).float()

    def leaves(self, emptied: int | None = None) -> dict[History, tuple[float, Accountant]]:
        """Return every transcript's probability, and the accountant after it.

        Member `emptied` answers as the public model throughout.
        """
        return enumerated(
            self.depth,
            self.budget.epsilon(DELTA),
            lambda history, accountant: self._answer(history, accountant, emptied),
        )

    def _answer(self, history: History, accountant: Accountant, emptied: int | None) -> list[float]:
        """Charge the answer after this history, and return the probability of every token."""
        private, public = self.node(history)
        if emptied is not None:
            private[emptied] = public
        temperature, top_k = self.shapes[sum(history) % len(self.shapes)]
        ticket = self.mechanism.propose(
            private[:, None],
            public[None],
            rng=SeededRandom(0),
            temperature=temperature,
            top_k=top_k,
        )
        accountant.charge(ticket)
        found = ticket._distribution
        kept = found.rows.tokens
        probabilities = torch.zeros(self.vocab, dtype=torch.float64)
        probabilities[slice(None) if kept is None else kept[0]] = found.probabilities()[0]
        answer: list[float] = probabilities.tolist()
        return answer

    def divergence(self, orders: Sequence[float]) -> float:
        """Return the largest D_α(P ‖ P°)/(what the budget allows at α).

        The maximum is over the emptied member and both directions.

        Args:
            orders: α; under a budget in "renyi" only the budget's own order.
        """
        here = {history: mass for history, (mass, _) in self.leaves().items()}
        largest = 0.0
        for member in range(self.models):
            there = {history: mass for history, (mass, _) in self.leaves(member).items()}
            for order in orders:
                allowed = self.budget.amount * (order if self.budget.order is None else 1.0)
                largest = max(largest, divergence(here, there, order) / allowed)
        return largest


@dataclass(frozen=True)
class ExtremalTree(Tree):
    """A tree whose every query is the dominating pair of one box.

    No answer loses more of what it is charged. Two of three tokens have mass π = (1-c)/(C-c).
    Member 0 is C q on one of them, every other member on the other, and all are c q elsewhere. The
    history decides which tokens these are. By the lemma of docs/theory/per-shard-budgets.md, member
    0 loses its whole charge if the others are c q. So `depth` answers lose the sum of their
    charges, until the budget is spent.

    Attributes:
        box: of the members' distributions around q.
    """

    box: ClippedMixing = ClippedMixing(0.9, 1.3, order=4.0)

    def node(self, history: History) -> tuple[Tensor, Tensor]:
        """Return the query after this history; see :meth:`Tree.node`."""
        box = self.box
        rng = np.random.default_rng([self.seed, len(history), *history])
        own, others, rest = rng.permutation(3)
        share = (1 - box.lower) / (box.upper - box.lower)
        public = np.log([share, share, 1 - 2 * share])[np.argsort([own, others, rest])]
        private = np.tile(public - FAR, (self.models, 1))
        private[0, own] += 2 * FAR
        private[1:, others] += 2 * FAR
        return torch.from_numpy(private).float(), torch.from_numpy(public).float()

    @staticmethod
    def charge(box: ClippedMixing, models: int) -> float:
        """Return the charge of member 0, by the formula, in float64."""
        assert box.order is not None
        share = (1 - box.lower) / (box.upper - box.lower)
        q, u = np.array([share, 1 - share]), np.array([box.upper, box.lower])
        return float(charge_of(q, (q * u)[None], box.lower, box.order, models)[0])
