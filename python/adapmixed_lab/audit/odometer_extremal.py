"""Trees on which AdaPMixED's ex-post statement is nearly tight (docs/theory/adapmixed.md).

The proof loses nothing if X = L e^{-E} is e^c α/(α-1) on a rare branch and X^{α-1} hardly counts
elsewhere. So each answer has a rare token of mass a in one world and b = a/u in the other,

    u = α/(α-1) e^{E + c_α(δ)},    a = (e^{(α-1)e} - 1)/u^{α-1},

where e is the answer's loss and E the total including it. Once the token is drawn, every model
answers q. Then sup P(S) - ∫_S e^ε dQ is δ (1 - e^{-(α-1) Σe}). With several orders each answer is
made for one of them, the highest first, because lower orders hardly see the atoms of higher ones.
"""

from __future__ import annotations

import math

import numpy as np

from adapmixed.mechanisms import AdaPMixED
from adapmixed.privacy.conversions import c_alpha
from adapmixed_lab.audit.mechanism_trees import FAR
from adapmixed_lab.audit.odometer_trees import Adjacency, Odometer, Queries
from adapmixed_lab.audit.search import Array, both_ways

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
