"""The per-model filter on enumerated adaptive trees."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.audit.finding import SLACK, Effort, Finding
from adapmixed.audit.mechanism_trees import ExtremalTree, Tree
from adapmixed.audit.trees import Adversary, largest_divergence
from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy import FilterBudget
from adapmixed.rng import SeededRandom

TREES_PER_SECOND = 0.8  # of each kind
ORDER = 4.0
SHAPES = [(1, 2, 7), (2, 3, 5), (3, 3, 5)]  # models, tokens, answers
BOXES = [(0.6, 1.7), (0.85, 2.5), (0.4, 1.3)]
AMOUNTS = (0.02, 0.1, 0.5)
DELTA = 1e-5


def _adversary(seed: int, kind: int) -> tuple[Adversary, int]:
    models, vocab, depth = SHAPES[kind]
    return Adversary(seed, models, vocab, *BOXES[kind]), depth


def _trees(effort: Effort) -> Iterator[Finding]:
    """Over random adversaries, the largest divergence of all leaves / the budget."""
    generator = effort.generator("filter/trees")
    number = effort.count(TREES_PER_SECOND, 2)
    claim = f"D_{ORDER:g} of the transcript / budget"
    for kind, (models, vocab, depth) in enumerate(SHAPES):
        largest = 0.0
        for turn in range(number):
            adversary, _ = _adversary(int(generator.integers(2**32)), kind)
            amount = AMOUNTS[turn % len(AMOUNTS)]
            largest = max(largest, largest_divergence(adversary, depth, amount, ORDER) / amount)
        name = f"{number} trees of {depth} answers, {vocab} tokens, {models} models"
        yield Finding("filter", name, claim, 1 + SLACK, largest, 1.0)
    # Slots that are never retired, against a budget of 0.1.
    adversary, depth = _adversary(1, 1)
    unfiltered = largest_divergence(adversary, depth, 1e9, ORDER) / 0.1
    yield Finding("filter", "nothing is retired", claim, 1 + SLACK, unfiltered, 1.0, True)


def _box(lower: float, upper: float) -> ClippedMixing:
    return ClippedMixing(lower, upper, charge_order=ORDER)


# Models, tokens, answers; which of two settings answers depends on the history.
Setting = tuple[int, int, int, tuple[Mechanism, ...]]
POOLS: list[Setting] = [
    (1, 2, 7, (ClippedLogPool(-0.3, 0.3, 1.0), ClippedLogPool(-0.2, 0.5, 1.0))),
    (2, 3, 5, (ClippedLogPool(-0.5, 0.5, 1.0), ClippedLogPool(-0.4, 0.8, 1.5))),
    (3, 3, 5, (ClippedLogPool(-0.5, 0.5, 2.0), ClippedLogPool(-0.5, 1.0, 2.0))),
]
MIXINGS: list[Setting] = [
    (1, 2, 7, (_box(0.8, 1.2), _box(0.9, 1.3))),
    (2, 3, 5, (_box(0.6, 1.7), _box(0.85, 2.5))),
]
SPENT = (0.05, 0.1, 0.2)
ZCDP_ORDERS = (1.5, 2.0, 4.0, 16.0)
ENDLESS = 1e9


def _tree(
    setting: Setting, seed: int, amount: float, *, counts: bool = False
) -> tuple[Tree, tuple[float, ...]]:
    """A tree with a budget, and its orders; with counts answers have half of twice the budget."""
    models, vocab, depth, mechanisms = setting
    order = ORDER if isinstance(mechanisms[0], ClippedMixing) else None
    measure = "zcdp" if order is None else "renyi"
    budget = FilterBudget(measure, 2 * amount if counts else amount, DELTA, order)
    thresholds = (amount / 4, amount / 2) if counts else ()
    sigma = None
    if counts:  # so many releases cost `amount`
        sigma = math.sqrt(len(thresholds) * (order or 1.0) / (2 * amount)) * (1 + 1e-6)
    tree = Tree(mechanisms, seed, models, vocab, depth, budget, thresholds, sigma)
    return tree, ZCDP_ORDERS if order is None else (order,)


def _mechanism_trees(effort: Effort) -> Iterator[Finding]:
    """The mechanisms' own charges and laws, and counts that are released with noise."""
    generator = effort.generator("filter/mechanisms")
    number = effort.count(TREES_PER_SECOND, 2)

    def seed() -> int:
        return int(generator.integers(2**32))

    def finding(setting: Setting, what: str, measured: float, control: bool = False) -> Finding:
        models, vocab, depth, mechanisms = setting
        name = f"{mechanisms[0].name}: {what} of {depth} answers, {vocab} tokens, {models} models"
        orders = f"{ORDER:g}" if isinstance(mechanisms[0], ClippedMixing) else "α"
        budget = "budget" if orders != "α" else "(α budget), α = 1.5 to 16"
        claim = f"D_{orders} of the transcript / {budget}"
        return Finding("filter", name, claim, 1 + SLACK, measured, 1.0, control)

    for setting in (*POOLS, *MIXINGS):
        for counts in (False, True):
            largest = 0.0
            for turn in range(number):
                amount = SPENT[turn % len(SPENT)]
                tree, orders = _tree(setting, seed(), amount, counts=counts)
                largest = max(largest, tree.divergence(orders))
            what = f"{number} trees, two noisy counts" if counts else f"{number} trees"
            yield finding(setting, what, largest)
    for setting in (POOLS[0], MIXINGS[0]):
        tree, orders = _tree(setting, 1, ENDLESS)
        unfiltered = tree.divergence(orders) * (ENDLESS / SPENT[0])
        yield finding(setting, "nothing is retired in a tree", unfiltered, True)
        tree, orders = _tree(setting, 1, SPENT[0], counts=True)
        assert tree.sigma is not None
        louder = tree.divergence(orders, sigma=tree.sigma / 2)
        yield finding(setting, "counts with half the noise that was paid for, a tree", louder, True)


# Models and boxes of extremal trees; so many answers of the first of them are within the budget.
EXTREMAL = [(1, 0.9, 1.3), (2, 0.9, 1.3), (3, 0.9, 1.3), (2, 0.85, 2.5)]
ADMITTED, ASKED = 4, 5
UNDERSTATED = 0.8


def _extremal_tree(models: int, lower: float, upper: float, told: float = 1.0) -> ExtremalTree:
    """A budget that `ADMITTED` answers use up to their loss error, and one answer more."""
    box = _box(lower, upper)
    amount = ADMITTED * ExtremalTree.charge(box, models) * (1 + 1e-4)
    budget = FilterBudget("renyi", amount, DELTA, ORDER)
    return ExtremalTree((box,), models, models, 3, ASKED, budget, told=told)


def _extremal_trees() -> Iterator[Finding]:
    """Answers that lose all that they are charged: charges that are too small show."""
    claim = f"D_{ORDER:g} of the transcript / budget"
    for told in (1.0, UNDERSTATED):
        for models, lower, upper in EXTREMAL:
            tree = _extremal_tree(models, lower, upper, told)
            name = f"clipped-mixing [{lower:g}, {upper:g}]: an extremal tree, {models} models"
            if told < 1:
                name += f", {told:g} of every charge"
            found = tree.divergence((ORDER,))
            yield Finding("filter", name, claim, 1 + SLACK, found, 1.0, told < 1)


def _charges(mechanism: Mechanism, private: Tensor, public: Tensor) -> Tensor:
    charges = mechanism.propose(private, public, rng=SeededRandom(0)).charges
    assert charges is not None
    return charges[0]


def _losses(private: Tensor, public: Tensor) -> Tensor:
    clipping = ops.clip_project(private, public, lower=0.6, upper=1.6)
    losses = ops.leave_one_out(private, public, clipping, orders=ORDER, adjacency="zero_out")
    return losses[0]


def _others(effort: Effort) -> Iterator[Finding]:
    """Charges of member 0 while all other members change."""
    generator = effort.generator("filter/others")
    models, positions, vocab = 6, 8, 300
    number = effort.count(4.0, 3)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(generator.normal(size=shape)).float()

    box, pool = ClippedMixing(0.6, 1.6, charge_order=ORDER), ClippedLogPool(-9.0, 9.0, 0.1)
    differing = {box.name: 0, pool.name: 0, "a loss of the realised mixture": 0}
    for _ in range(number):
        public = 2 * normal(positions, vocab)
        private = public + normal(models, positions, vocab)
        changed = private + 3 * normal(models, positions, vocab)
        changed[0] = private[0]
        for mechanism in (box, pool):
            pair = [_charges(mechanism, rows, public) for rows in (private, changed)]
            differing[mechanism.name] += int((pair[0] != pair[1]).sum())
        pair = [_losses(rows, public) for rows in (private, changed)]
        differing["a loss of the realised mixture"] += int((pair[0] != pair[1]).sum())
    claim = f"charges that change of {number * positions}"
    for name, count in differing.items():
        yield Finding(
            "filter", f"{name}: other shards change", claim, 0.0, float(count), 1.0,
            name not in (box.name, pool.name),
        )  # fmt: skip


def audit(effort: Effort) -> Iterator[Finding]:
    """Trees, and charges that other shards must not move."""
    yield from _trees(effort)
    yield from _mechanism_trees(effort)
    yield from _extremal_trees()
    yield from _others(effort)
