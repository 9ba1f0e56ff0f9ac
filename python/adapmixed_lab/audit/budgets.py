"""Budgets of every shard: accountants with an ε are attacked on enumerated adaptive trees.

The adversary's answers differ at every node. The trees are small enough to be enumerated to the
last leaf, so that the distribution of a whole transcript is exact. A mechanism answers each node as
a generator would: it proposes, and the branch's accountant charges and so decides which members
contribute. The tokens follow the distribution that the ticket would release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy import Accountant
from adapmixed.privacy.composition import ShardBudget
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import SLACK, Effort, Finding
from adapmixed_lab.audit.search import FAR, both_ways, charged

TREES_PER_SECOND = 0.5  # of each kind
DELTA = 1e-5
ORDER = 4.0
SPENT = (0.05, 0.1, 0.2)
ZCDP_ORDERS = (1.5, 2.0, 4.0, 16.0)
ENDLESS = 1e9
SHAPES = ((1.0, None), (0.6, None), (1.5, 2))

History = tuple[int, ...]
"""The tokens answered so far."""


@dataclass(frozen=True)
class Tree:
    """An adversary whose queries, and their shapes, depend on the answers so far.

    Attributes:
        models, vocab: N and V.
        depth: number of answers.
        mechanism: answers the queries; it has individual charges.
        amount: of the budget of every shard.
        seed: of the queries.
        shapes: (temperature, top_k) of the rows; the history decides which pair a query uses.
        told: the fraction of every charge that the accountant is told; below 1 in a control.
    """

    models: int
    vocab: int
    depth: int
    mechanism: Mechanism
    amount: float = ENDLESS
    seed: int = 1
    shapes: tuple[tuple[float, int | None], ...] = SHAPES
    told: float = 1.0

    @property
    def budget(self) -> ShardBudget:
        """The budget of every shard."""
        largest = self.mechanism.largest_charge(self.models)
        return ShardBudget(self.amount, self.mechanism.charge_order, largest)

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
            private[:, None], public[None], rng=SeededRandom(0), temperature=temperature,
            top_k=top_k,
        )  # fmt: skip
        assert ticket._charges is not None
        ticket._charges = self.told * ticket._charges
        accountant.charge(ticket)
        distribution = ticket._distribution
        kept = distribution.rows.tokens
        probabilities = torch.zeros(self.vocab, dtype=torch.float64)
        probabilities[slice(None) if kept is None else kept[0]] = distribution.probabilities()[0]
        answer: list[float] = probabilities.tolist()
        return answer

    def divergence(self) -> float:
        """Return the largest D_α(P ‖ P°)/(what the budget allows at α).

        The maximum is over the emptied member, both directions, and α: the budget's own order, or
        `ZCDP_ORDERS`.
        """
        order = self.budget.order
        allowed = (
            {a: a * self.amount for a in ZCDP_ORDERS} if order is None else {order: self.amount}
        )
        here = np.array([mass for mass, _ in self.leaves().values()])
        largest = 0.0
        for member in range(self.models):
            there = np.array([mass for mass, _ in self.leaves(member).values()])
            for a, most in allowed.items():
                largest = max(largest, float(both_ways(here, there, a)) / most)
        return largest


def _box(lower: float, upper: float) -> ClippedMixing:
    return ClippedMixing(lower, upper, order=ORDER)


POOLS = [
    Tree(1, 2, 7, ClippedLogPool(-0.2, 0.5, 1.0)),
    Tree(2, 3, 5, ClippedLogPool(-0.5, 0.5, 1.0)),
    Tree(3, 3, 5, ClippedLogPool(-0.5, 1.0, 2.0)),
]
MIXINGS = [Tree(1, 2, 7, _box(0.8, 1.2)), Tree(2, 3, 5, _box(0.85, 2.5))]


def _trees(effort: Effort) -> Iterator[Finding]:
    """Attack the mechanisms' own charges and distributions."""
    generator = effort.generator("budgets/mechanisms")
    number = effort.count(TREES_PER_SECOND, 2)

    def finding(tree: Tree, what: str, measured: float, control: bool = False) -> Finding:
        name = (
            f"{tree.mechanism.name}: {what} of {tree.depth} answers, {tree.vocab} tokens, "
            f"{tree.models} models"
        )
        claim = f"D_{ORDER:g} of the transcript / budget"
        if tree.budget.order is None:
            claim = "D_α of the transcript / (α budget), α = 1.5 to 16"
        return Finding("budgets", name, claim, 1 + SLACK, measured, 1.0, control)

    for tree in (*POOLS, *MIXINGS):
        seeded = (
            replace(tree, seed=int(generator.integers(2**32)), amount=SPENT[turn % len(SPENT)])
            for turn in range(number)
        )
        yield finding(tree, f"{number} trees", max(variant.divergence() for variant in seeded))
    for tree in (POOLS[0], MIXINGS[0]):
        unbounded = tree.divergence() * (ENDLESS / SPENT[0])
        yield finding(tree, "no member runs out in a tree", unbounded, True)


class ExtremalTree(Tree):
    """A tree whose every query is the dominating pair of the mechanism's box.

    No answer loses more of what it is charged. Two of three tokens have mass π = (1-c)/(C-c).
    Member 0 is C q on one of them, every other member on the other, and all are c q elsewhere. The
    history decides which tokens these are. By the lemma of docs/theory/per-shard-budgets.md, member
    0 loses its whole charge if the others are c q. So the answers lose the sum of their charges,
    until the budget is spent.
    """

    def node(self, history: History) -> tuple[Tensor, Tensor]:
        """Return the query after this history; see :meth:`Tree.node`."""
        assert isinstance(self.mechanism, ClippedMixing)
        rng = np.random.default_rng([self.models, len(history), *history])
        token, others, rest = rng.permutation(3)
        share = (1 - self.mechanism.lower) / (self.mechanism.upper - self.mechanism.lower)
        public = np.log([share, share, 1 - 2 * share])[np.argsort([token, others, rest])]
        private = np.tile(public - FAR, (self.models, 1))
        private[0, token] += 2 * FAR
        private[1:, others] += 2 * FAR
        return torch.from_numpy(private).float(), torch.from_numpy(public).float()


# Models and box of each extremal tree; the budget admits the first ADMITTED of ASKED answers.
EXTREMAL = [(1, 0.9, 1.3), (2, 0.9, 1.3), (3, 0.9, 1.3), (2, 0.85, 2.5)]
ADMITTED, ASKED = 4, 5
UNDERSTATED = 0.8


def _extremal_tree(models: int, lower: float, upper: float, told: float = 1.0) -> ExtremalTree:
    """Return a tree that asks one answer more than the `ADMITTED` that use up its budget.

    Args:
        told: the fraction of every charge that the accountant is told.
    """
    box, share = _box(lower, upper), (1 - lower) / (upper - lower)
    # Member 0's charge, by the formula of docs/theory/per-shard-budgets.md.
    q, ratio = np.array([share, 1 - share]), np.array([upper, lower])
    base, mixture = (((models - 1) * lower + member) / models for member in (1.0, ratio))
    charge = float(both_ways(q * mixture, q * base, ORDER))
    amount = ADMITTED * charge * (1 + 1e-4)
    return ExtremalTree(models, 3, ASKED, box, amount, shapes=SHAPES[:1], told=told)


def _extremal_trees() -> Iterator[Finding]:
    """Attack trees that lose all that they are charged, so that too small a charge shows."""
    claim = f"D_{ORDER:g} of the transcript / budget"
    for told in (1.0, UNDERSTATED):
        for models, lower, upper in EXTREMAL:
            tree = _extremal_tree(models, lower, upper, told)
            name = f"clipped-mixing [{lower:g}, {upper:g}]: an extremal tree, {models} models"
            if told < 1:
                name += f", {told:g} of every charge"
            yield Finding("budgets", name, claim, 1 + SLACK, tree.divergence(), 1.0, told < 1)


def _losses(private: Tensor, public: Tensor) -> Tensor:
    clipping = ops.clip_project(private, public, lower=0.6, upper=1.6)
    losses = ops.leave_one_out(private, public, clipping, orders=ORDER, adjacency="zero_out")
    return losses[0]


def _others(effort: Effort) -> Iterator[Finding]:
    """Compare the charges of member 0 while all other members change."""
    generator = effort.generator("budgets/others")
    models, positions, vocab = 6, 8, 300
    number = effort.count(4.0, 3)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(generator.normal(size=shape)).float()

    costs: dict[str, Callable[[Tensor, Tensor], Any]] = {"a loss of the realised mixture": _losses}
    for mechanism in (_box(0.6, 1.6), ClippedLogPool(-9.0, 9.0, 0.1)):
        costs[mechanism.name] = partial(charged, mechanism)
    differing = dict.fromkeys(costs, 0)
    for _ in range(number):
        public = 2 * normal(positions, vocab)
        private = public + normal(models, positions, vocab)
        changed = private + 3 * normal(models, positions, vocab)
        changed[0] = private[0]
        for name, charges in costs.items():
            differing[name] += int((charges(private, public) != charges(changed, public)).sum())
    claim = f"charges that change of {number * positions}"
    for name, count in differing.items():
        what, control = f"{name}: other shards change", costs[name] is _losses
        yield Finding("budgets", what, claim, 0.0, float(count), 1.0, control)


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack budgets with trees, and check that other shards do not change a charge."""
    yield from _trees(effort)
    yield from _extremal_trees()
    yield from _others(effort)
