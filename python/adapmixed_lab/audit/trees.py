"""Adaptive trees under budgets of every shard: an adversary whose answers differ at every node.

The trees are small enough to be enumerated to the last leaf, so that the distribution of a whole
transcript is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from adapmixed.mechanisms import ClippedMixing, Origin
from adapmixed.privacy import Accountant, LeaveOneOutLoss
from adapmixed.privacy.budget import ShardBudget
from adapmixed.privacy.events import Pay

DELTA = 1e-5
"""δ of the accountants of all trees."""

Array = NDArray[np.float64]
History = tuple[int, ...]
"""The tokens answered so far."""
Leaves = dict[History, float]


class Adversary:
    """An adversary whose N members answer in a box around q, differently at every node."""

    def __init__(self, seed: int, models: int, vocab: int, lower: float, upper: float) -> None:
        self.seed, self.models, self.vocab = seed, models, vocab
        self.lower, self.upper = lower, upper

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
    epsilon = ShardBudget("renyi", amount, order).epsilon(DELTA)
    mechanism = ClippedMixing(adversary.lower, adversary.upper, order=order)
    result: Leaves = {}

    def walk(history: History, mass: float, accountant: Accountant) -> None:
        if len(history) == depth:
            result[history] = mass
            return
        q, bars = adversary.node(history)
        charges = charge_of(q, bars, adversary.lower, order)
        if emptied is not None:
            bars[emptied], charges[emptied] = q, 0.0
        written = Written(mechanism, charges)
        accountant.charge(written)
        state = accountant.state()
        answer = np.where(written.active[:, None], bars, q).mean(0)
        for token, p in enumerate(answer):
            walk((*history, token), mass * float(p), Accountant.from_state(state))

    walk((), 1.0, Accountant(DELTA, epsilon=epsilon))
    return result


def renyi(p: Leaves, q: Leaves, order: float) -> float:
    """Return D_order(p ‖ q) of two distributions of transcripts."""
    return math.log(math.fsum(a * (a / q[k]) ** (order - 1) for k, a in p.items())) / (order - 1)


def largest_divergence(adversary: Adversary, depth: int, amount: float, order: float) -> float:
    """Return the largest divergence over both directions and the emptied member."""
    here = leaves(adversary, depth, amount, None, order)
    emptied = (leaves(adversary, depth, amount, i, order) for i in range(adversary.models))
    return max(max(renyi(here, x, order), renyi(x, here, order)) for x in emptied)


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
