"""Adaptive trees that AdaPMixED answers, and its running ε(D) on every branch.

The nodes of a tree are its histories, level by level. Token v after node k of a level leads to node
k V + v of the next. The trees are small enough to be enumerated to the last leaf, in both worlds.

On the extremal trees the ex-post statement is nearly tight (docs/theory/adapmixed.md). The proof
loses nothing if X = L e^{-E} is e^c α/(α-1) on a rare branch and X^{α-1} hardly counts elsewhere.
So each answer has a rare token of mass a in one world and b = a/u in the other,

    u = α/(α-1) e^{E + c_α(δ)},    a = (e^{(α-1)e} - 1)/u^{α-1},

where e is the answer's loss and E the total including it. Once the token is drawn, every model
answers q. Then sup P(S) - ∫_S e^ε dQ is δ (1 - e^{-(α-1) Σe}). With several orders each answer is
made for one of them, the highest first, because lower orders hardly see the atoms of higher ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant, Event, LeaveOneOutLoss
from adapmixed.privacy.conversions import c_alpha
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit.search import (
    Array,
    both_ways,
    distribution,
    maximise,
    neighbour,
    one_thread,
    realised,
    released,
)
from adapmixed_lab.audit.trees import FAR, excess

Adjacency = Literal["add_remove", "zero_out"]
Queries = tuple[Tensor, Tensor]
"""(private (N, K, V), public (K, V)) float32 logits of the query after each of K histories."""
Branches = list[tuple[float, float, float]]
"""For every transcript: its probability under P and under Q, and ε."""


@dataclass(frozen=True)
class Odometer:
    """A tree of queries, the mechanism that answers them, and what is charged.

    Attributes:
        mechanism: answers the queries, with D and with its neighbour.
        delta: of the statement.
        charged: a control: another mechanism, whose losses are counted instead.
        told: the fraction of each answer's loss that the accountant is told; below 1 in controls.
        split: whether δ is divided evenly over the orders. False is a control: the best order is
            chosen on every branch.
        adding: a control: the ensemble at hand lacks the member, and the neighbour adds it.
    """

    mechanism: AdaPMixED
    models: int
    vocab: int
    depth: int
    delta: float
    charged: AdaPMixED | None = None
    told: tuple[float, ...] = ()
    split: bool = True
    adding: bool = False

    @property
    def nodes(self) -> int:
        """K, the number of histories that a query follows."""
        return sum(self.vocab**level for level in range(self.depth))

    @property
    def size(self) -> int:
        """Length of a vector that holds all logits of a tree."""
        return self.nodes * (self.models + 1) * self.vocab

    @cached_property
    def _levels(self) -> list[slice]:
        ends = np.cumsum([0, *(self.vocab**level for level in range(self.depth))]).tolist()
        return [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]

    @property
    def _told(self) -> tuple[float, ...]:
        return self.told or (1.0,) * self.depth

    @property
    def _charged(self) -> tuple[AdaPMixED, tuple[float, ...]]:
        """The mechanism whose losses are counted, and their orders."""
        mechanism = self.charged or self.mechanism
        return mechanism, mechanism.loss_orders or (mechanism.order,)

    @property
    def _parts(self) -> list[float]:
        """The part of δ of each order."""
        count = len(self._charged[1])
        if not self.split:
            return [self.delta] * count
        return [self.delta / count] * count

    def queries(self, vectors: Array) -> Queries:
        """Return (private (N, B K, V), public (B K, V)) from B vectors (B, size)."""
        logits = torch.from_numpy(vectors).float().view(-1, self.models + 1, self.vocab)
        rows = logits.transpose(0, 1).contiguous()
        return rows[1:], rows[0]

    def _neighbours(self, queries: Queries) -> list[Tensor]:
        """Return the private logits without each of the members in turn."""
        private, public = queries
        order = [[i, *(j for j in range(self.models) if j != i)] for i in range(self.models)]
        return [neighbour(private[o], public, public, self.mechanism.adjacency) for o in order]

    def _masses(self, answers: Array) -> Array:
        """Return (B, V^depth), the probability of every transcript.

        Args:
            answers: (B, K, V), the probability of every token after every history.
        """
        masses = np.ones((len(answers), 1))
        for level in self._levels:
            masses = (masses[..., None] * answers[:, level]).reshape(len(answers), -1)
        return masses

    # Reported values: one query after the other, as a driver asks and charges.

    def _epsilons(self, private: Tensor, public: Tensor) -> list[float]:
        """Return ε(D) on every branch, from accountants that are charged answer by answer."""
        mechanism, orders = self._charged
        # The accountant divides δ by the number of orders: without a split each gets all of δ.
        delta = self.delta if self.split else self.delta * len(orders)
        level: list[list[Event]] = [[]]  # of each history, what was charged so far
        for share, nodes in zip(self._told, self._levels, strict=True):
            charged = []
            for k, before in zip(range(nodes.start, nodes.stop), level, strict=True):
                ticket = mechanism.propose(
                    private[:, k : k + 1], public[k : k + 1], rng=SeededRandom(0)
                )
                told = (
                    replace(event, loss=share * event.loss)
                    if isinstance(event, LeaveOneOutLoss)
                    else event
                    for event in ticket._events
                )
                charged.append([*before, *told])
            level = [after for after in charged for _ in range(self.vocab)]
        epsilons = (Accountant(delta).add(events).guarantee().epsilon for events in level)
        return [epsilon for epsilon in epsilons if epsilon is not None]

    def _answers(self, private: Tensor, public: Tensor) -> Array:
        """Return (1, K, V), the released probability of every token after every history."""
        found = []
        for k in range(self.nodes):
            rows = private[:, k : k + 1], public[k : k + 1]
            answers = (
                released(self.mechanism, *rows, targets=torch.tensor([v]), rng=SeededRandom(0))
                for v in range(self.vocab)
            )
            logs = [answer.log_prob for answer in answers]
            found.append([math.exp(float(log)) for log in logs if log is not None])
        return np.array([found])

    def branches(self, queries: Queries) -> list[Branches]:
        """Return all branches for each member that is removed; Q is the distribution without it."""
        private, public = queries
        here = self._masses(self._answers(private, public))[0]
        found = []
        epsilons = [] if self.adding else self._epsilons(private, public)
        for rows in self._neighbours(queries):
            there = self._masses(self._answers(rows, public))[0]
            if self.adding:
                epsilons = self._epsilons(rows, public)
            found.append(list(zip(here.tolist(), there.tolist(), epsilons, strict=True)))
        return found

    def measured(self, queries: Queries) -> float:
        """Return the largest sup_S P(S) - ∫_S e^ε(D) dQ over removed members and directions."""
        return max(excess(branches) for branches in self.branches(queries))

    def exceeded(self, queries: Queries) -> float:
        """Return the largest P(log P/Q > ε(D)), about which nothing is claimed."""
        return max(
            math.fsum(p for p, q, epsilon in branches if p > math.exp(epsilon) * q)
            for branches in self.branches(queries)
        )

    # The objective of a search: the same in arrays, for many trees at once.

    def objective(self, vectors: Array) -> Array:
        """Return (B,), the excess relative to δ of trees given by vectors (B, size).

        If nothing is exceeded, the value is at most 0 and says how much is missing, so that a
        search finds its way.
        """
        queries = private, public = self.queries(vectors)
        shape = len(vectors), self.nodes, self.vocab
        p = self._masses(distribution(self.mechanism, private, public).reshape(shape))
        epsilon = None if self.adding else self._estimated(private, public)
        largest = np.full(len(vectors), -np.inf)
        for rows in self._neighbours(queries):
            q = self._masses(distribution(self.mechanism, rows, public).reshape(shape))
            if self.adding:
                epsilon = self._estimated(rows, public)
            assert epsilon is not None
            with np.errstate(all="ignore"):
                for a, b in ((p, q), (q, p)):
                    over = np.maximum(0.0, a - np.exp(epsilon) * b).sum(1) / self.delta
                    short = (np.log(a / b) - epsilon).max(1)
                    largest = np.fmax(largest, np.where(over > 0, over, np.minimum(short, 0.0)))
        return largest

    def _estimated(self, private: Tensor, public: Tensor) -> Array:
        """Return (B, V^depth), ε without the accountant's rounding."""
        mechanism, orders = self._charged
        losses = realised(mechanism, private, public)
        models, _, columns = losses.shape
        losses = losses.reshape(models, -1, self.nodes, columns)
        total: Array = np.zeros((models, losses.shape[1], 1, columns))
        for share, level in zip(self._told, self._levels, strict=True):
            total = np.repeat(total + share * losses[:, :, level], self.vocab, axis=2)
        costs = [c_alpha(*pair) for pair in zip(orders, self._parts, strict=True)]
        epsilon: Array = (total + costs).min(-1).max(0)
        return np.maximum(0.0, epsilon)

    def search(self, steps: int, generator: np.random.Generator) -> Queries:
        """Return the tree with the largest objective that a search over all its logits visits."""
        best: tuple[float, Array] = (-math.inf, np.zeros(self.size))

        def objective(vectors: Array) -> Array:
            nonlocal best
            values = self.objective(vectors)
            k = int(values.argmax())
            if values[k] > best[0]:
                best = float(values[k]), vectors[k].copy()
            return values

        with one_thread():
            maximise(objective, self.size, steps, generator)
        return self.queries(best[1][None])


Pair = tuple[float, float]


def _atoms(orders: tuple[float, ...], spend: tuple[float, ...], parts: list[float]) -> list[Pair]:
    """Return (a, b) of each answer, from its own order, its part of δ and its own loss."""
    atoms: list[Pair] = []
    for order, loss, delta in zip(orders, spend, parts, strict=True):
        before = sum(float(both_ways(_pair(p), _pair(q), order)) for p, q in atoms)
        cost = before + loss + c_alpha(order, delta)
        u = order / (order - 1) * math.exp(cost)
        mass = math.expm1((order - 1) * loss) * math.exp(-(order - 1) * math.log(u))
        atoms.append((mass, mass / u))
    return atoms


def _pair(mass: float) -> Array:
    return np.array([mass, 1 - mass])


def _rows(mass: Pair, models: int, *, backwards: bool) -> tuple[float, float, float]:
    """Return the rare token's probability in q, in the removed member, and in the others.

    The neighbour gives it b, or a if `backwards`.
    """
    a, b = mass
    if not backwards:  # the others answer q
        return b, models * a - (models - 1) * b, b
    return models * a - (models - 1) * b, b, b


def extremal(
    models: int,
    adjacency: Adjacency,
    orders: tuple[float, ...],
    spend: tuple[float, ...],
    delta: float,
    *,
    vocab: int = 2,
    backwards: bool = False,
    edge: bool = False,
    split: bool = True,
    seed: int = 0,
) -> tuple[Odometer, Queries]:
    """Return a tree with one answer for each of `orders`, which loses the matching `spend`.

    Args:
        models: N >= 1; with `backwards` only 1, or any N under zero-out.
        delta: of the statement.
        backwards: the removed model makes the token rarer instead of likelier.
        edge: the removed model's row asks for more, and the ball lets exactly this much through.
        split: as in :class:`Odometer`.
        seed: of the order of the tokens, which differs at every node.
    """
    order, distinct = orders[0], tuple(dict.fromkeys(orders))
    parts = [delta / len(distinct) if split else delta] * len(orders)
    atoms = _atoms(orders, spend, parts)
    answers = [_rows(mass, models, backwards=backwards) for mass in atoms]
    radius = 599.0 / (order - 1)  # nothing here reaches it
    if edge:
        radius = max(float(both_ways(_pair(own), _pair(q), order)) for q, own, _ in answers)
    mechanism = AdaPMixED(
        order,
        radius / order,
        screen=None,
        loss_orders=distinct,
        adjacency=adjacency,
    )
    tree = Odometer(mechanism, models, vocab, len(orders), delta, split=split)
    logits = np.zeros((tree.nodes, models + 1, vocab))
    rng = np.random.default_rng([seed, models, vocab, *map(int, orders)])
    open_ = [True]  # whether no rare token was drawn yet; if one was, all answer q
    node = 0
    for rare, own, others in answers:
        below = []
        for asking in open_:
            token = int(rng.integers(vocab))
            if asking:
                row = logits[node]
                row[:] = -math.log(vocab - 1)
                row[:, token] = [_logit(mass) for mass in (rare, own, *[others] * (models - 1))]
                if edge:
                    row[1, token] = -FAR if backwards else FAR
            below += [asking and v != token for v in range(vocab)]
            node += 1
        open_ = below
    return tree, tree.queries(logits.reshape(1, -1))


def _logit(mass: float) -> float:
    """Return the logit of a token if the exponentials of the others sum to 1."""
    return math.log(mass) - math.log1p(-mass)
