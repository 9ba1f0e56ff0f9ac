"""AdaPMixED's running ε(D), an ex-post statement, on enumerated adaptive trees.

The attacks take the statement of docs/theory/adapmixed.md word for word. Let P and Q be the
distributions of all transcripts with and without a member. Then P(S) - ∫_S e^ε(D) dQ is at most δ
for every S, and so is the same with P and Q exchanged. AdaPMixED answers every query, and an
accountant that is charged answer by answer states ε on every branch.

On the extremal trees the statement is nearly tight. The proof loses nothing if X = L e^{-E} is
e^c α/(α-1) on a rare branch and X^{α-1} hardly counts elsewhere. So each answer has a rare token of
mass a in one world and b = a/u in the other,

    u = α/(α-1) e^{E + c_α(δ)},    a = (e^{(α-1)e} - 1)/u^{α-1},

where e is the answer's loss and E the total including it. Once the token is drawn, every model
answers q. Then sup P(S) - ∫_S e^ε dQ is δ (1 - e^{-(α-1) Σe}). With several orders each answer is
made for one of them, the highest first, because lower orders hardly see the atoms of higher ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.audit import SLACK, Effort, Finding, search
from adapmixed_lab.audit.search import Array

CLAIM = "sup P(S) - ∫_S e^ε(D) dQ"
DELTA = 1e-5


@dataclass(frozen=True)
class Odometer:
    """A tree of queries, the mechanism that answers them, and what is charged.

    The nodes are the K histories that a query follows. Token v after node k leads to node
    k V + 1 + v. The trees are small enough to be enumerated to the last leaf, in both worlds.

    Attributes:
        mechanism: answers the queries, with D and with its neighbour.
        private, public: logits (N, K, V) and (K, V) of the queries.
        delta: the accountant's, which divides it over the orders.
        told: the fraction of each answer's loss that the accountant is told; below 1 in controls.
        charged: a control: another mechanism, whose losses are counted instead.
        adding: a control: the ensemble at hand lacks the member, and the neighbour adds it.
    """

    mechanism: AdaPMixED
    private: Tensor
    public: Tensor
    delta: float
    told: tuple[float, ...]
    charged: AdaPMixED | None = None
    adding: bool = False

    def _paths(self) -> tuple[NDArray[np.int64], ...]:
        """Return the node and the token of each answer of every transcript, (V^depth, depth)."""
        vocab = self.public.shape[1]
        tokens = np.array([*product(range(vocab), repeat=len(self.told))])
        nodes = [np.zeros_like(tokens[:, 0])]
        for drawn in tokens.T[:-1]:
            nodes.append(nodes[-1] * vocab + 1 + drawn)
        return np.stack(nodes, axis=1), tokens

    def _masses(self, private: Tensor) -> Array:
        """Return (V^depth,), the probability of every transcript."""
        answers = search.distribution(self.mechanism, private, self.public)
        return np.asarray(answers[self._paths()].prod(-1))

    def _stated(self, private: Tensor) -> Array:
        """Return (V^depth,), ε on every branch, from accountants charged answer by answer."""
        event = search.realised(self.charged or self.mechanism, private, self.public)
        epsilons = []
        for nodes in self._paths()[0]:
            pairs = zip(self.told, nodes, strict=True)
            answers = [replace(event, loss=part * event.loss[:, [node]]) for part, node in pairs]
            epsilons.append(Accountant(self.delta).add(answers).guarantee().epsilon)
        return np.array(epsilons, dtype=np.float64)

    def branches(self) -> Iterator[tuple[Array, Array, Array]]:
        """Yield P, Q and ε of all branches, (V^depth,), for each member that Q lacks."""
        p, here = self._masses(self.private), self._stated(self.private)
        for member in range(len(self.private)):
            first = self.private.roll(-member, 0)
            there = search.neighbour(first, self.public, self.public, self.mechanism.adjacency)
            yield p, self._masses(there), self._stated(there) if self.adding else here

    def measured(self) -> float:
        """Return the largest sup_S P(S) - ∫_S e^ε(D) dQ over removed members and directions."""
        return max(float(search.hockey_stick(*branch)) for branch in self.branches())

    def exceeded(self) -> float:
        """Return the largest P(log P/Q > ε(D)), about which nothing is claimed."""
        return max(float(p[p > np.exp(e) * q].sum()) for p, q, e in self.branches())


def _pair(mass: float) -> Array:
    return np.array([mass, 1 - mass])


def _atoms(
    orders: tuple[float, ...], spend: tuple[float, ...], delta: float
) -> list[tuple[float, float]]:
    """Return (a, b) of each answer, from its own order, the δ of an order and its own loss."""
    atoms: list[tuple[float, float]] = []
    for order, loss in zip(orders, spend, strict=True):
        before = sum(float(search.both_ways(_pair(p), _pair(q), order)) for p, q in atoms)
        u = order / (order - 1) * math.exp(before + loss + c_alpha(order, delta))
        mass = math.expm1((order - 1) * loss) * math.exp(-(order - 1) * math.log(u))
        atoms.append((mass, mass / u))
    return atoms


def extremal(
    models: int,
    adjacency: Literal["add_remove", "zero_out"],
    orders: tuple[float, ...],
    spend: tuple[float, ...],
    delta: float,
    *,
    vocab: int = 2,
    backwards: bool = False,
    edge: bool = False,
) -> Odometer:
    """Return a tree with one answer for each of `orders`, which loses the matching `spend`.

    Args:
        models: N >= 1; with `backwards` only 1, or any N under zero-out.
        delta: the accountant's.
        backwards: the removed model makes the token rarer instead of likelier.
        edge: the removed model's row asks for more, and the ball lets exactly this much through.
    """
    order, distinct = orders[0], tuple(dict.fromkeys(orders))
    masses = []  # the rare token's probability in q, in the removed member, and in all others
    for a, b in _atoms(orders, spend, delta / len(distinct)):
        moved = models * a - (models - 1) * b
        masses.append((moved, b, b) if backwards else (b, moved, b))
    radius = 599.0 / (order - 1)  # nothing here reaches it
    if edge:
        radius = max(float(search.both_ways(_pair(p), _pair(q), order)) for q, p, _ in masses)
    mechanism = AdaPMixED(
        order, radius / order, screen=None, loss_orders=distinct, adjacency=adjacency
    )
    nodes = sum(vocab**level for level in range(len(orders)))
    logits = np.zeros((models + 1, nodes, vocab))  # the public model's come first
    rng = np.random.default_rng([models, vocab, *map(int, orders)])
    asking = [0]  # nodes before which no rare token was drawn; at all others all models answer q
    for q, p, others in masses:
        below = []
        for node in asking:
            token = int(rng.integers(vocab))
            likelihoods = np.array([q, p, *[others] * (models - 1)])
            logits[:, node] = -math.log(vocab - 1)
            logits[:, node, token] = np.log(likelihoods) - np.log1p(-likelihoods)
            if edge:
                logits[1, node, token] = -search.FAR if backwards else search.FAR
            below += [node * vocab + 1 + v for v in range(vocab) if v != token]
        asking = below
    public, *private = torch.from_numpy(logits).float()
    return Odometer(mechanism, torch.stack(private), public, delta, (1.0,) * len(orders))


_THREE = (8.0,) * 3, (0.4,) * 3
_EDGE = " at the edge of the ball"
# A suffix of the name, and what makes the tree: N, neighbours, the order of each answer, its loss.
Extremal = tuple[str, partial[Odometer]]
EXTREMAL: list[Extremal] = [
    ("", partial(extremal, 1, "add_remove", (8.0,) * 4, (0.25,) * 4)),
    ("", partial(extremal, 2, "add_remove", (8.0,) * 4, (0.25,) * 4)),
    ("", partial(extremal, 3, "zero_out", (18.0,) * 3, (0.2,) * 3, vocab=3)),
    (f",{_EDGE}", partial(extremal, 2, "add_remove", *_THREE, edge=True)),
    (f",{_EDGE}", partial(extremal, 3, "zero_out", *_THREE, edge=True)),
    (f", Q over P{_EDGE}", partial(extremal, 1, "zero_out", *_THREE, edge=True, backwards=True)),
    (", Q over P", partial(extremal, 3, "zero_out", *_THREE, backwards=True)),
]
SEVERAL: list[Extremal] = [
    (", δ split", partial(extremal, 1, "zero_out", (8.0, 2.0), (0.6, 4.0))),
    (", δ split", partial(extremal, 2, "add_remove", (8.0, 2.0), (0.6, 4.0))),
    (", δ split", partial(extremal, 3, "add_remove", (16.0, 4.0, 2.0), (0.3, 1.2, 3.0))),
]
AFTERWARDS = "the best order chosen afterwards"
"""A control. An accountant that is given δ once for each order chooses like this."""


def _called(tree: Odometer) -> str:
    """Return a name from the mechanism's orders and the tree."""
    orders = tree.mechanism.loss_orders or (tree.mechanism.order,)
    models, _, vocab = tree.private.shape
    return (
        f"adapmixed α = {', '.join(f'{order:g}' for order in orders)}, an extremal tree of "
        f"{len(tree.told)} answers, {vocab} tokens, N = {models}, {tree.mechanism.adjacency}"
    )


def _finding(name: str, measured: float, control: bool = False, claim: str = CLAIM) -> Finding:
    return Finding("odometer", name, claim, DELTA * (1 + SLACK), measured, 1.0, control)


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack trees on which the statement is nearly tight, so that too small an ε shows.

    The controls have the ε of another statement, or too small charges. The effort changes nothing.
    """
    for what, setting in (*EXTREMAL, *SEVERAL):
        tree = setting(delta=DELTA)
        yield _finding(_called(tree) + what, tree.measured())
    for _, setting in SEVERAL:
        chosen = setting(delta=DELTA * len(setting.args[2]))
        yield _finding(f"{_called(chosen)}, {AFTERWARDS}", chosen.measured(), True)
    edge, tree = EXTREMAL[3][1](delta=DELTA), EXTREMAL[1][1](delta=DELTA)
    smaller = replace(edge.mechanism, target_leakage=edge.mechanism.target_leakage / 2)
    for what, broken in (
        ("answers from a ball twice as large as charged", replace(edge, charged=smaller)),
        ("its first answer is not charged", replace(tree, told=(0.0, 1.0, 1.0, 1.0))),
        ("0.8 of every loss", replace(tree, told=(0.8,) * 4)),
        ("a member is added, not removed", replace(tree, adding=True)),
    ):
        yield _finding(f"{_called(broken)}, {what}", broken.measured(), True)
    name = f"{_called(tree)}, read as a bound of another event"
    yield _finding(name, tree.exceeded(), True, "P(log P/Q > ε(D))")
