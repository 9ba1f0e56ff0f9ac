"""Budgets of every shard: accountants with an ε are attacked on enumerated adaptive trees."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy.budget import ShardBudget
from adapmixed_lab.audit.finding import SLACK, Effort, Finding
from adapmixed_lab.audit.search import charged
from adapmixed_lab.audit.trees import ExtremalTree, Tree, Understated

TREES_PER_SECOND = 0.5  # of each kind
ORDER = 4.0


def _box(lower: float, upper: float) -> ClippedMixing:
    return ClippedMixing(lower, upper, order=ORDER)


# Models, tokens, answers, and the mechanism that answers.
Setting = tuple[int, int, int, Mechanism]
POOLS: list[Setting] = [
    (1, 2, 7, ClippedLogPool(-0.2, 0.5, 1.0)),
    (2, 3, 5, ClippedLogPool(-0.5, 0.5, 1.0)),
    (3, 3, 5, ClippedLogPool(-0.5, 1.0, 2.0)),
]
MIXINGS: list[Setting] = [(1, 2, 7, _box(0.8, 1.2)), (2, 3, 5, _box(0.85, 2.5))]
SHAPES_ASKED = ((1.0, None), (0.6, None), (1.5, 2))
"""(temperature, top_k) of the rows; the history decides which pair a query uses."""
SPENT = (0.05, 0.1, 0.2)
ZCDP_ORDERS = (1.5, 2.0, 4.0, 16.0)
ENDLESS = 1e9


def _tree(setting: Setting, seed: int, amount: float) -> tuple[Tree, tuple[float, ...]]:
    """Return a tree with this budget, and the orders of its divergence."""
    models, vocab, depth, mechanism = setting
    assert mechanism.measure is not None
    measure, order = mechanism.measure
    budget = ShardBudget(measure, amount, order, mechanism.largest_charge(models))
    tree = Tree(mechanism, seed, models, vocab, depth, budget, SHAPES_ASKED)
    return tree, ZCDP_ORDERS if order is None else (order,)


def _trees(effort: Effort) -> Iterator[Finding]:
    """Attack the mechanisms' own charges and distributions."""
    generator = effort.generator("budgets/mechanisms")
    number = effort.count(TREES_PER_SECOND, 2)

    def finding(setting: Setting, what: str, measured: float, control: bool = False) -> Finding:
        models, vocab, depth, mechanism = setting
        name = f"{mechanism.name}: {what} of {depth} answers, {vocab} tokens, {models} models"
        orders = f"{ORDER:g}" if isinstance(mechanism, ClippedMixing) else "α"
        budget = "budget" if orders != "α" else "(α budget), α = 1.5 to 16"
        claim = f"D_{orders} of the transcript / {budget}"
        return Finding("budgets", name, claim, 1 + SLACK, measured, 1.0, control)

    for setting in (*POOLS, *MIXINGS):
        largest = 0.0
        for turn in range(number):
            seed = int(generator.integers(2**32))
            tree, orders = _tree(setting, seed, SPENT[turn % len(SPENT)])
            largest = max(largest, tree.divergence(orders))
        yield finding(setting, f"{number} trees", largest)
    for setting in (POOLS[0], MIXINGS[0]):
        tree, orders = _tree(setting, 1, ENDLESS)
        unbounded = tree.divergence(orders) * (ENDLESS / SPENT[0])
        yield finding(setting, "no member runs out in a tree", unbounded, True)


# Models and box of each extremal tree; the budget admits the first ADMITTED of ASKED answers.
EXTREMAL = [(1, 0.9, 1.3), (2, 0.9, 1.3), (3, 0.9, 1.3), (2, 0.85, 2.5)]
ADMITTED, ASKED = 4, 5
UNDERSTATED = 0.8


def _extremal_tree(models: int, lower: float, upper: float, told: float = 1.0) -> ExtremalTree:
    """Return a tree that asks one answer more than the `ADMITTED` that use up its budget.

    Args:
        told: the fraction of every charge that the accountant is told.
    """
    box = _box(lower, upper)
    budget = ShardBudget("renyi", ADMITTED * ExtremalTree.charge(box, models) * (1 + 1e-4), ORDER)
    mechanism: Mechanism = box if told == 1.0 else Understated(box, told)
    return ExtremalTree(mechanism, models, models, 3, ASKED, budget, box=box)


def _extremal_trees() -> Iterator[Finding]:
    """Attack trees that lose all that they are charged, so that too small a charge shows."""
    claim = f"D_{ORDER:g} of the transcript / budget"
    for told in (1.0, UNDERSTATED):
        for models, lower, upper in EXTREMAL:
            tree = _extremal_tree(models, lower, upper, told)
            name = f"clipped-mixing [{lower:g}, {upper:g}]: an extremal tree, {models} models"
            if told < 1:
                name += f", {told:g} of every charge"
            found = tree.divergence((ORDER,))
            yield Finding("budgets", name, claim, 1 + SLACK, found, 1.0, told < 1)


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

    box, pool = ClippedMixing(0.6, 1.6, order=ORDER), ClippedLogPool(-9.0, 9.0, 0.1)
    differing = {box.name: 0, pool.name: 0, "a loss of the realised mixture": 0}
    for _ in range(number):
        public = 2 * normal(positions, vocab)
        private = public + normal(models, positions, vocab)
        changed = private + 3 * normal(models, positions, vocab)
        changed[0] = private[0]
        for mechanism in (box, pool):
            one, other = (charged(mechanism, rows, public)[0] for rows in (private, changed))
            differing[mechanism.name] += int((one != other).sum())
        pair = [_losses(rows, public) for rows in (private, changed)]
        differing["a loss of the realised mixture"] += int((pair[0] != pair[1]).sum())
    claim = f"charges that change of {number * positions}"
    for name, count in differing.items():
        yield Finding(
            "budgets", f"{name}: other shards change", claim, 0.0, float(count), 1.0,
            name not in (box.name, pool.name),
        )  # fmt: skip


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack budgets with trees, and check that other shards do not change a charge."""
    yield from _trees(effort)
    yield from _extremal_trees()
    yield from _others(effort)
