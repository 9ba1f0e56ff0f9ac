"""Adaptive trees under budgets of every shard: an adversary whose answers differ at every node.

The trees are small enough to be enumerated to the last leaf, so that the distribution of a whole
transcript is exact. A mechanism answers each node as a generator would: it proposes, and the
branch's accountant charges and so decides which members contribute. The tokens follow the
distribution that the ticket would release.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import ClippedMixing, Mechanism, NextToken, Rows
from adapmixed.privacy import Accountant
from adapmixed.privacy.budget import ShardBudget
from adapmixed.rng import SeededRandom
from adapmixed_ext.types import RandomSource
from adapmixed_lab.audit.search import Array, both_ways

DELTA = 1e-5
"""δ of the accountants of all trees."""

History = tuple[int, ...]
"""The tokens answered so far."""


def excess(branches: Iterable[tuple[float, float, float]]) -> float:
    """Return sup_S P(S) - ∫_S e^ε dQ, or the same with P and Q exchanged if it is larger.

    Args:
        branches: P, Q and ε of every transcript.
    """
    charged = [(p, q, math.exp(epsilon)) for p, q, epsilon in branches]
    forward = math.fsum(max(0.0, p - ratio * q) for p, q, ratio in charged)
    return max(forward, math.fsum(max(0.0, q - ratio * p) for p, q, ratio in charged))


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
        start = Accountant(DELTA, epsilon=self.budget.epsilon(DELTA))
        level: dict[History, tuple[float, Accountant]] = {(): (1.0, start)}
        for _ in range(self.depth):
            below = {}
            for history, (mass, before) in level.items():
                # Each branch goes on with an accountant of its own.
                after = Accountant.from_state(before.state())
                for token, p in enumerate(self._answer(history, after, emptied)):
                    below[(*history, token)] = (mass * p, after)
            level = below
        return level

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
        here = np.array([mass for mass, _ in self.leaves().values()])
        largest = 0.0
        for member in range(self.models):
            there = np.array([mass for mass, _ in self.leaves(member).values()])
            for order in orders:
                allowed = self.budget.amount * (order if self.budget.order is None else 1.0)
                largest = max(largest, float(both_ways(here, there, order)) / allowed)
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
        """Return the charge of member 0, by the formula of docs/theory/per-shard-budgets.md."""
        order = box.order
        assert order is not None
        share = (1 - box.lower) / (box.upper - box.lower)
        q, ratio = np.array([share, 1 - share]), np.array([box.upper, box.lower])
        base = ((models - 1) * box.lower + 1) / models
        own = ((models - 1) * box.lower + ratio) / models

        def f(x: Array) -> Array:
            powers: Array = x**order
            return powers - 1 - order * (x - 1)

        forward, backward = (q * base * f(own / base)).sum(), (q * own * f(base / own)).sum()
        return math.log1p(max(forward, backward)) / (order - 1)
