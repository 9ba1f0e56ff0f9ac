"""Claims about the Rényi ball under attack: PMixED, AdaPMixED, subsets, replace-one."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, Mechanism, PMixED
from adapmixed.privacy import RenyiBound
from adapmixed.privacy.conversions import replace_one_epsilon
from adapmixed.privacy.costs.pmixed import sound_bound
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit.search import Array, Shape, both_ways, distribution, hockey_stick
from adapmixed_lab.audit.subsets import amplification_rate
from adapmixed_lab.audit.target import RESOLVED, Target, largest
from adapmixed_lab.reproduce.published_bound import published_bound

DELTAS = (0.5, 0.1, 0.01)


def ball_targets() -> list[Target]:
    """Return all targets of this module, controls last."""
    found = [
        _ball_target(PMixED(8.0, 1e-5, 10, order), models, rate)
        for order, rate, models in ((3.0, 1.0, 3), (6.0, 1.0, 1), (18.0, 0.3, 4))
    ]
    realised = [
        AdaPMixED(18.0, 0.1, screen=None, adjacency="add_remove"),
        AdaPMixED(18.0, 0.1, screen=None),
        AdaPMixED(3.0, 0.2, screen=None, loss_orders=(8.0,), adjacency="add_remove"),
    ]
    found += [_realised_target(one, one.adjacency) for one in realised]
    found += [_fixed_target(order, models, "zero_out") for order, models in ((3.0, 3), (8.0, 1))]
    found += [_subset_target(2.0, 3, 0.5, "subset"), _subset_target(2.0, 2, 0.8, "slots")]
    found += [_replaced_target(order, models) for order, models in ((6.0, 1), (3.0, 2))]
    return [
        *found,
        published_target(4),
        _realised_target(realised[1], "add_remove"),
        _fixed_target(3.0, 4, "add_remove"),
        _subset_target(2.0, 3, 0.5, "subset, amplified at its rate"),
        _doubled_target(),
    ]


def _ball_target(mechanism: PMixED, models: int, rate: float) -> Target:
    """Return an attack on the theorem, with hidden subsets of the members if `rate` < 1."""
    order = mechanism.order
    bound = sound_bound(order, mechanism.radius(models), models, rate)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return both_ways(p, q, order) / bound

    def answers(mechanism: Mechanism, private: Tensor, public: Tensor) -> Array:
        nobody = distribution(mechanism, public[None], public)  # q
        return rate * distribution(mechanism, private, public) + (1 - rate) * nobody

    name = f"pmixed α = {order:g}, rate {rate:g}, N = {models}, zero_out"
    shape, claim = Shape(models, 3), "true D_α / sound bound"
    return Target(name, claim, mechanism, shape, "zero_out", ratio, answers=answers)


def _realised_target(mechanism: AdaPMixED, adjacency: str) -> Target:
    """Return an attack on the loss that the accountant adds.

    It is a control if `adjacency` is not the mechanism's own.
    """
    (order,) = mechanism.loss_orders or (mechanism.order,)

    def ratio(p: Array, q: Array, charge: Array | None) -> Array:
        assert charge is not None
        return (both_ways(p, q, order) - RESOLVED) / np.maximum(charge, 1e-300)

    control = adjacency != mechanism.adjacency
    name = f"adapmixed α = {mechanism.order:g}, member 0 of 3, {adjacency}"
    if order != mechanism.order:
        name += f", loss at order {order:g}"
    if control:
        name += f", its loss that of {mechanism.adjacency}"
    claim = "true loss / its own charge"
    shape = Shape(3, 3)
    return Target(name, claim, mechanism, shape, adjacency, ratio, control, charged=True)


def _fixed_target(order: float, models: int, adjacency: str) -> Target:
    """Return an attack on AdaPMixED's fixed bound, which holds for zero-out alone.

    With "add_remove" it is a control: the mechanism divides by the number of present members.
    """
    mechanism = AdaPMixED(order, 0.05, screen=None, loss="fixed")
    proposed = mechanism.propose(torch.zeros(models, 1, 2), torch.zeros(1, 2), rng=SeededRandom(0))
    events = proposed._events
    (bound,) = (one.epsilon for one in events if isinstance(one, RenyiBound))

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return both_ways(p, q, order) / bound

    name = f"adapmixed, loss='fixed', α = {order:g}, N = {models}, {adjacency}"
    claim, shape = "true D_α / the bound that is charged", Shape(models, 2)
    return Target(name, claim, mechanism, shape, adjacency, ratio, adjacency != "zero_out")


def _subset_target(order: float, models: int, rate: float, divisor: str) -> Target:
    """Return an attack on the bound for hidden random subsets, which are all enumerated.

    Each member is drawn with probability `rate`.
    """
    control = divisor not in ("subset", "slots")
    by = "subset" if control else divisor
    amplified = rate if control else amplification_rate(rate, models, by)
    mechanism = AdaPMixED(order, 1.0, screen=None, loss="fixed")
    bound = sound_bound(order, mechanism.radius, models, amplified)

    def answers(mechanism: Mechanism, private: Tensor, public: Tensor) -> Array:
        found: Array = np.zeros(public.shape)
        nobody = distribution(mechanism, public[None], public)  # q
        for drawn in product((False, True), repeat=len(private)):
            share = float(np.prod([rate if taken else 1 - rate for taken in drawn]))
            answer = nobody
            if any(drawn):
                answer = distribution(mechanism, private[list(drawn)], public)
            if by == "slots":
                answer = (sum(drawn) * answer + (len(drawn) - sum(drawn)) * nobody) / len(drawn)
            found += share * answer
        return found

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return both_ways(p, q, order) / bound

    name = f"α = {order:g}, subsets at rate {rate:g}, divided by {divisor}, N = {models}, zero_out"
    claim, shape = "true D_α / sound bound", Shape(models, 2)
    return Target(name, claim, mechanism, shape, "zero_out", ratio, control, answers)


def _replaced_target(order: float, models: int) -> Target:
    """Return an attack on (2ε, (1 + e^ε) δ) for replace-one, derived through the emptied shard.

    Budgets and the planner state replace-one in this form.
    """
    mechanism = AdaPMixED(order, 0.5 / order, screen=None, loss="fixed")
    spent = sound_bound(order, mechanism.radius, models)
    claims = [(replace_one_epsilon(order, spent, delta), delta) for delta in DELTAS]

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return largest([hockey_stick(p, q, epsilon) / delta for epsilon, delta in claims])

    name = f"through the emptied shard, α = {order:g}, N = {models}, replace_one"
    return Target(name, "true δ(ε) / δ", mechanism, Shape(models, 2), "replace_one", ratio)


def _doubled_target() -> Target:
    """Return a control: twice the Rényi bound of an emptied shard bounds no replacement."""
    order = 3.0
    mechanism = AdaPMixED(order, 0.05, screen=None, loss="fixed")
    bound = 2 * sound_bound(order, mechanism.radius, 1)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return both_ways(p, q, order) / bound

    name = f"twice the Rényi bound of an emptied shard, α = {order:g}, N = 1, replace_one"
    shape = Shape(1, 2)
    return Target(name, "true D_α / bound", mechanism, shape, "replace_one", ratio, True)


def published_target(models: int) -> Target:
    """Return a control: the published data-independent bound, which is not valid."""
    order, beta = 3.0, 0.01
    bound = published_bound(order, beta, models)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return both_ways(p, q, order) / bound

    name = f"published PMixED bound, N = {models}, add_remove"
    mechanism = AdaPMixED(order, beta, screen=None, adjacency="add_remove")
    shape = Shape(models, 2)
    return Target(name, "true D_α / published bound", mechanism, shape, "add_remove", ratio, True)
