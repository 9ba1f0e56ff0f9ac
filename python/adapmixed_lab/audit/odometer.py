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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy import Accountant, LeaveOneOutLoss
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.audit import search
from adapmixed_lab.audit.finding import SLACK, Effort, Finding
from adapmixed_lab.audit.search import Array

STEPS_PER_SECOND = 6.0  # of each search
CLAIM = "sup P(S) - ∫_S e^ε(D) dQ"
DELTA = 1e-5
SEARCHED_DELTA = 0.05  # so large that a search meets such branches by chance

Queries = tuple[Tensor, Tensor]
"""(private (N, B K, V), public (B K, V)) logits of the queries after K histories, of B trees."""


@dataclass(frozen=True)
class Odometer:
    """A tree of queries, the mechanism that answers them, and what is charged.

    The nodes are the K histories that a query follows. Token v after node k leads to node
    k V + 1 + v. The trees are small enough to be enumerated to the last leaf, in both worlds.

    Attributes:
        mechanism: answers the queries, with D and with its neighbour.
        delta: the accountant's, which divides it over the orders.
        charged: a control: another mechanism, whose losses are counted instead.
        told: the fraction of each answer's loss that the accountant is told; below 1 in controls.
        adding: a control: the ensemble at hand lacks the member, and the neighbour adds it.
    """

    mechanism: AdaPMixED
    models: int
    vocab: int
    depth: int
    delta: float
    charged: AdaPMixED | None = None
    told: tuple[float, ...] = ()
    adding: bool = False

    @property
    def nodes(self) -> int:
        """K, the number of histories that a query follows."""
        return sum(self.vocab**level for level in range(self.depth))

    @cached_property
    def _paths(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The node and the token of each answer of every transcript, both (V^depth, depth)."""
        tokens = np.array([*product(range(self.vocab), repeat=self.depth)])
        nodes = [np.zeros(len(tokens), dtype=np.int64)]
        for drawn in tokens.T[:-1]:
            nodes.append(nodes[-1] * self.vocab + 1 + drawn)
        return np.stack(nodes, axis=1), tokens

    def queries(self, vectors: Array) -> Queries:
        """Return the queries of trees given by vectors, (B, K (N + 1) V)."""
        return search.unpacked(vectors, self.models, self.vocab)

    def _masses(self, private: Tensor, public: Tensor) -> Array:
        """Return (B, V^depth), the probability of every transcript."""
        answers = search.distribution(self.mechanism, private, public)
        nodes, tokens = self._paths
        found: Array = answers.reshape(-1, self.nodes, self.vocab)[:, nodes, tokens].prod(-1)
        return found

    def _losses(self, private: Tensor, public: Tensor) -> tuple[LeaveOneOutLoss, Array]:
        """Return AdaPMixED's event, and (N, B, V^depth, depth, orders), the losses to tell."""
        event = search.realised(self.charged or self.mechanism, private, public)
        losses = event.loss.reshape(len(event.loss), -1, self.nodes, len(event.orders))
        told = np.array(self.told or (1.0,) * self.depth)
        return event, told[:, None] * losses[:, :, self._paths[0]]

    def stated(self, private: Tensor, public: Tensor) -> Array:
        """Return ε on every branch of one tree, from accountants charged answer by answer."""
        event, losses = self._losses(private, public)
        epsilons = []
        for branch in losses[:, 0].swapaxes(0, 1):
            events = [replace(event, loss=branch[:, t : t + 1]) for t in range(self.depth)]
            epsilons.append(Accountant(self.delta).add(events).guarantee().epsilon)
        return np.array([epsilons], dtype=np.float64)

    def estimated(self, private: Tensor, public: Tensor) -> Array:
        """Return ε of many trees without the accountant's rounding, for a search."""
        event, losses = self._losses(private, public)
        costs = [c_alpha(order, self.delta / len(event.orders)) for order in event.orders]
        epsilon: Array = (losses.sum(-2) + costs).min(-1).max(0)
        return np.maximum(0.0, epsilon)

    def branches(
        self, queries: Queries, epsilon: Callable[[Tensor, Tensor], Array] | None = None
    ) -> Iterator[tuple[Array, Array, Array]]:
        """Yield P, Q and ε of all branches, (B, V^depth), for each member that Q lacks."""
        private, public = queries
        epsilon = epsilon or self.stated
        p, here = self._masses(private, public), epsilon(private, public)
        for member in range(self.models):
            first = private.roll(-member, 0)
            there = search.neighbour(first, public, public, self.mechanism.adjacency)
            charged = epsilon(there, public) if self.adding else here
            yield p, self._masses(there, public), charged

    def measured(self, queries: Queries) -> float:
        """Return the largest sup_S P(S) - ∫_S e^ε(D) dQ over removed members and directions."""
        return max(float(search.hockey_stick(*branches)[0]) for branches in self.branches(queries))

    def exceeded(self, queries: Queries) -> float:
        """Return the largest P(log P/Q > ε(D)), about which nothing is claimed."""
        return max(float(p[p > np.exp(e) * q].sum()) for p, q, e in self.branches(queries))

    def objective(self, vectors: Array) -> Array:
        """Return (B,), the excess relative to δ of trees given by vectors.

        If nothing is exceeded, the value is at most 0 and says how much is missing, so that a
        search finds its way.
        """
        largest = np.full(len(vectors), -np.inf)
        for p, q, epsilon in self.branches(self.queries(vectors), self.estimated):
            with np.errstate(all="ignore"):
                over = search.hockey_stick(p, q, epsilon) / self.delta
                short = (np.abs(np.log(p / q)) - epsilon).max(1)
            largest = np.fmax(largest, np.where(over > 0, over, np.minimum(short, 0.0)))
        return largest

    def search(self, steps: int, generator: np.random.Generator) -> Queries:
        """Return the tree with the largest objective that a search over all its logits visits."""
        size = self.nodes * (self.models + 1) * self.vocab
        best, _ = search.maximise(self.objective, size, steps, generator)
        return self.queries(best)


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
) -> tuple[Odometer, Queries]:
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
        radius = max(float(search.both_ways(_pair(own), _pair(q), order)) for q, own, _ in masses)
    mechanism = AdaPMixED(
        order, radius / order, screen=None, loss_orders=distinct, adjacency=adjacency
    )
    tree = Odometer(mechanism, models, vocab, len(orders), delta)
    logits = np.zeros((tree.nodes, models + 1, vocab))
    rng = np.random.default_rng([models, vocab, *map(int, orders)])
    asking = [0]  # nodes before which no rare token was drawn; at all others all models answer q
    for q, own, others in masses:
        below = []
        for node in asking:
            token = int(rng.integers(vocab))
            likelihoods = np.array([q, own, *[others] * (models - 1)])
            logits[node] = -math.log(vocab - 1)
            logits[node, :, token] = np.log(likelihoods) - np.log1p(-likelihoods)
            if edge:
                logits[node, 1, token] = -search.FAR if backwards else search.FAR
            below += [node * vocab + 1 + v for v in range(vocab) if v != token]
        asking = below
    return tree, tree.queries(logits.reshape(1, -1))


_THREE = (8.0,) * 3, (0.4,) * 3
_EDGE = " at the edge of the ball"
# A suffix of the name, and what makes the tree: N, neighbours, the order of each answer, its loss.
Extremal = tuple[str, partial[tuple[Odometer, Queries]]]
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


def _called(tree: Odometer, kind: str = "an extremal tree") -> str:
    """Return a name from the mechanism's orders and the tree."""
    orders = tree.mechanism.loss_orders or (tree.mechanism.order,)
    return (
        f"adapmixed α = {', '.join(f'{order:g}' for order in orders)}, {kind} of {tree.depth} "
        f"answers, {tree.vocab} tokens, N = {tree.models}, {tree.mechanism.adjacency}"
    )


def _finding(name: str, delta: float, measured: float, control: bool = False) -> Finding:
    return Finding("odometer", name, CLAIM, delta * (1 + SLACK), measured, 1.0, control)


def _extremal_trees() -> Iterator[Finding]:
    """Attack trees on which the statement is nearly tight, so that too small an ε shows.

    The controls have the ε of another statement, or too small charges.
    """
    for what, setting in (*EXTREMAL, *SEVERAL):
        tree, queries = setting(delta=DELTA)
        yield _finding(_called(tree) + what, DELTA, tree.measured(queries))
    for _, setting in SEVERAL:
        tree, queries = setting(delta=DELTA * len(setting.args[2]))
        yield _finding(f"{_called(tree)}, {AFTERWARDS}", DELTA, tree.measured(queries), True)
    tree, queries = EXTREMAL[1][1](delta=DELTA)
    for what, broken in (
        ("its first answer is not charged", replace(tree, told=(0.0, 1.0, 1.0, 1.0))),
        ("0.8 of every loss", replace(tree, told=(0.8,) * 4)),
        ("a member is added, not removed", replace(tree, adding=True)),
    ):
        yield _finding(f"{_called(tree)}, {what}", DELTA, broken.measured(queries), True)
    another = _finding(
        f"{_called(tree)}, read as a bound of another event", DELTA, tree.exceeded(queries), True
    )
    yield replace(another, claim="P(log P/Q > ε(D))")


def searched() -> list[tuple[str, Odometer, bool]]:
    """Return trees to search over all logits: (suffix of the name, tree, whether a control)."""
    emptied, delta = AdaPMixED(3.0, 1.0, screen=None), SEARCHED_DELTA
    added = replace(emptied, adjacency="add_remove")
    smaller = replace(added, target_leakage=0.5)
    several = replace(added, order=4.0, loss_orders=(4.0, 1.5))
    two = Odometer(smaller, 2, 2, 3, delta)
    larger = replace(two, mechanism=added)
    return [
        ("", replace(two, models=1), False),
        ("", replace(two, depth=4), False),
        ("", Odometer(emptied, 2, 2, 3, delta), False),
        ("", Odometer(added, 3, 3, 2, delta), False),
        ("", Odometer(emptied, 3, 2, 3, delta), False),
        (", δ split", Odometer(several, 2, 2, 3, delta), False),
        (f", {AFTERWARDS}", Odometer(several, 2, 2, 3, 2 * delta), True),
        (", its second answer is not charged", replace(two, told=(1.0, 0.0, 1.0)), True),
        (", half of every loss", replace(two, told=(0.5,) * 3), True),
        (", answers from a ball twice as large as charged", replace(larger, charged=smaller), True),
        (", losses of zero-out", replace(larger, charged=emptied), True),
        (", a member is added, not removed", replace(larger, adding=True), True),
    ]


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack nearly tight trees, and search for others that break the statement or a control."""
    yield from _extremal_trees()
    steps = effort.count(STEPS_PER_SECOND, 60)
    for index, (what, tree, control) in enumerate(searched()):
        queries = tree.search(steps, effort.generator(f"odometer/{index}"))
        name = _called(tree, "a tree, its logits searched,") + what
        yield _finding(name, SEARCHED_DELTA, tree.measured(queries), control)
