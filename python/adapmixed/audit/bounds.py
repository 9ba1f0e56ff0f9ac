"""Bounds: ensembles, searched for, whose true loss exceeds what is charged for them.

The laws are those that the mechanisms draw from; losses are computed here, in float64. A finding is
the largest ratio of a true loss to its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from adapmixed.audit.finding import SLACK, Effort, Finding
from adapmixed.audit.search import (
    Array,
    Shape,
    both_ways,
    hockey_stick,
    law,
    maximise,
    neighbour,
)
from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.privacy import (
    accounted_box,
    bounded_range_rho,
    clipped_mixing_pair,
    published_bound,
    sound_bound,
)
from adapmixed.rng import SeededRandom

STEPS_PER_SECOND = 6.0  # of each search
ORDERS = (1.5, 2.0, 8.0, 64.0)
ADJACENCIES = ("zero_out", "add_remove", "replace_one")
RESOLVED = 1e-13  # what float64 sums resolve of a divergence


@dataclass(frozen=True)
class Target:
    """A bound under attack: `ratio` gives true loss / bound of the two laws and the charges."""

    name: str
    claim: str
    mechanism: Mechanism
    shape: Shape
    adjacency: str
    ratio: Callable[[Array, Array, Array | None], Array]
    control: bool = False

    def objective(self, vectors: Array) -> Array:
        """The ratios of ensembles that are given by vectors."""
        private, public, other = self.shape.ensembles(vectors)
        there = neighbour(private, public, other, self.adjacency)
        charge = None
        if self.claim.endswith("its own charge"):
            charges = self.mechanism.propose(private, public, rng=SeededRandom(0)).charges
            assert charges is not None
            charge = np.asarray(charges[0, :, 0].numpy(), dtype=np.float64)
        with np.errstate(all="ignore"):
            p, q = law(self.mechanism, private, public), law(self.mechanism, there, public)
            ratio = self.ratio(p, q, charge)
        return np.where(np.isnan(ratio), -math.inf, ratio)


def _largest(ratios: list[Array]) -> Array:
    found: Array = np.max(np.stack(ratios), axis=0)
    return found


def _pair_target(box: tuple[float, float], models: int, adjacency: str, measure: str) -> Target:
    pair = clipped_mixing_pair(*accounted_box(*box), models, adjacency)
    epsilons = [0.0] + [pair.largest_loss() * share for share in (0.2, 0.5, 0.8)]
    sticks = [max(x.hockey_stick(e) for x in (pair, pair.exchanged())) for e in epsilons]
    renyis = [max(x.renyi(order) for x in (pair, pair.exchanged())) for order in ORDERS]

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        if measure == "δ(ε)":
            pairs = zip(epsilons, sticks, strict=True)
            return _largest([hockey_stick(p, q, e) / bound for e, bound in pairs if bound > 1e-6])
        return _largest([both_ways(p, q, a) / b for a, b in zip(ORDERS, renyis, strict=True)])

    name = f"clipped-mixing [{box[0]:.3g}, {box[1]:.3g}], N = {models}, {adjacency}"
    claim = f"true {measure} / that of the pair"
    return Target(name, claim, ClippedMixing(*box), Shape(models, 4), adjacency, ratio)


def _range_target(setting: tuple[float, float, float], models: int, adjacency: str) -> Target:
    lower, upper, scale = setting
    rho = bounded_range_rho(scale, lower, upper, models, adjacency)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return _largest([both_ways(p, q, a) / (a * rho) for a in ORDERS])

    name = f"clipped-log-pool [{lower:g}, {upper:g}] · {scale:g}, N = {models}, {adjacency}"
    return Target(
        name, "true D_α / (α ρ)", ClippedLogPool(*setting), Shape(models, 3), adjacency, ratio
    )


def _ball_target(mechanism: PMixED, models: int) -> Target:
    order, rate = mechanism.order, mechanism.sample_rate
    bound = sound_bound(order, mechanism.radius(models), models, rate)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return both_ways(p, q, order) / bound

    name = f"pmixed α = {order:g}, rate {rate:g}, N = {models}, zero_out"
    return Target(name, "true D_α / sound bound", mechanism, Shape(models, 3), "zero_out", ratio)


def _charge_target(mechanism: Mechanism, models: int) -> Target:
    order = mechanism.charge_order if isinstance(mechanism, ClippedMixing) else None

    def ratio(p: Array, q: Array, charge: Array | None) -> Array:
        assert charge is not None
        if order is not None:
            return (both_ways(p, q, order) - RESOLVED) / charge
        losses = [(both_ways(p, q, a) - RESOLVED) / (a * charge) for a in ORDERS]
        return _largest(losses)

    name = f"{mechanism.name}, member 0 of {models}, zero_out"
    shape = Shape(models, 3)
    return Target(name, "true loss / its own charge", mechanism, shape, "zero_out", ratio)


def _published_target(models: int) -> Target:
    order, beta = 3.0, 0.01
    bound = published_bound(order, beta, models)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return both_ways(p, q, order) / bound

    name = f"published PMixED bound, N = {models}, add_remove"
    mechanism = AdaPMixED(order, beta, screen=None)
    shape = Shape(models, 2)
    return Target(name, "true D_α / published bound", mechanism, shape, "add_remove", ratio, True)


def _halved_target() -> Target:
    base = _range_target((-1.0, 1.0, 4.0), 2, "zero_out")
    rho = bounded_range_rho(2.0, -1.0, 1.0, 2, "zero_out")

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return _largest([both_ways(p, q, a) / (a * rho) for a in ORDERS])

    name = "clipped-log-pool, scale doubled, N = 2, zero_out"
    return Target(name, base.claim, base.mechanism, base.shape, "zero_out", ratio, True)


def targets() -> list[Target]:
    """Everything that is attacked."""
    box = (math.exp(-0.5), math.exp(0.5))
    found = [
        _pair_target(box, models, adjacency, measure)
        for adjacency in ADJACENCIES
        for models in (1, 3)
        for measure in ("δ(ε)", "D_α")
    ]
    found += [
        _pair_target(other, 2, adjacency, "δ(ε)")
        for other in ((0.1, 1.05), (0.5, 4.0))
        for adjacency in ADJACENCIES
    ]
    found += [_range_target((-0.25, 0.5, 2.0), 3, adjacency) for adjacency in ADJACENCIES]
    found += [
        _ball_target(PMixED(8.0, 1e-5, 10, order, rate), models)
        for order, rate, models in ((3.0, 1.0, 3), (6.0, 1.0, 1), (18.0, 0.3, 4))
    ]
    found += [
        _charge_target(ClippedMixing(*box, charge_order=4.0), 3),
        _charge_target(ClippedMixing(0.5, 4.0, charge_order=1.5), 2),
        _charge_target(ClippedLogPool(-0.25, 0.5, 2.0), 3),
    ]
    return [*found, _published_target(4), _halved_target()]


def attack(target: Target, steps: int, generator: np.random.Generator) -> float:
    """The largest ratio found."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # calls are small
    try:
        return maximise(target.objective, target.shape.size, steps, generator)
    finally:
        torch.set_num_threads(threads)


def audit(effort: Effort) -> Iterator[Finding]:
    """Every bound."""
    steps = effort.count(STEPS_PER_SECOND, 5)
    for index, target in enumerate(targets()):
        largest = attack(target, steps, effort.generator(f"bounds/{index}"))
        yield Finding("bounds", target.name, target.claim, 1 + SLACK, largest, 1.0, target.control)
