"""Bounds: a search for ensembles whose true loss exceeds what is charged for them.

The distributions are those that the mechanisms draw from. Losses are computed here, in float64. A
finding is the largest ratio of a true loss to its bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from adapmixed.mechanisms import ClippedLogPool, ClippedMixing, Mechanism
from adapmixed.privacy.costs.clipped_log_pool import bounded_range_rho
from adapmixed.privacy.costs.clipped_mixing import accounted_box, clipped_mixing_pair
from adapmixed_lab.audit.balls import ball_targets
from adapmixed_lab.audit.finding import SLACK, Effort, Finding
from adapmixed_lab.audit.search import Array, Shape, both_ways, hockey_stick, maximise, one_thread
from adapmixed_lab.audit.target import RESOLVED, Target, largest

STEPS_PER_SECOND = 6.0  # of each search
ORDERS = (1.5, 2.0, 8.0, 64.0)
ADJACENCIES = ("zero_out", "replace_one")


def _pair_target(box: tuple[float, float], models: int, adjacency: str, measure: str) -> Target:
    pair = clipped_mixing_pair(*accounted_box(*box), models, adjacency)
    epsilons = [0.0] + [pair.largest_loss() * share for share in (0.2, 0.5, 0.8)]
    sticks = [float(hockey_stick(np.array(pair.p), np.array(pair.q), e)) for e in epsilons]
    renyis = [max(x.renyi(order) for x in (pair, pair.exchanged())) for order in ORDERS]

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        if measure == "δ(ε)":
            pairs = zip(epsilons, sticks, strict=True)
            return largest([hockey_stick(p, q, e) / bound for e, bound in pairs if bound > 1e-6])
        return largest([both_ways(p, q, a) / b for a, b in zip(ORDERS, renyis, strict=True)])

    name = f"clipped-mixing [{box[0]:.3g}, {box[1]:.3g}], N = {models}, {adjacency}"
    claim = f"true {measure} / that of the pair"
    return Target(name, claim, ClippedMixing(*box), Shape(models, 4), adjacency, ratio)


def _range_target(setting: tuple[float, float, float], models: int, adjacency: str) -> Target:
    lower, upper, scale = setting
    rho = bounded_range_rho(scale, lower, upper, models, adjacency)

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return largest([both_ways(p, q, a) / (a * rho) for a in ORDERS])

    name = f"clipped-log-pool [{lower:g}, {upper:g}] · {scale:g}, N = {models}, {adjacency}"
    claim, mechanism = "true D_α / (α ρ)", ClippedLogPool(*setting)
    return Target(name, claim, mechanism, Shape(models, 3), adjacency, ratio)


def _charge_target(mechanism: Mechanism, models: int) -> Target:
    order = mechanism.order if isinstance(mechanism, ClippedMixing) else None

    def ratio(p: Array, q: Array, charge: Array | None) -> Array:
        assert charge is not None
        if order is not None:
            return (both_ways(p, q, order) - RESOLVED) / charge
        losses = [(both_ways(p, q, a) - RESOLVED) / (a * charge) for a in ORDERS]
        return largest(losses)

    name = f"{mechanism.name}, member 0 of {models}, zero_out"
    shape = Shape(models, 3)
    claim = "true loss / its own charge"
    return Target(name, claim, mechanism, shape, "zero_out", ratio, charged=True)


def _halved_target() -> Target:
    base = _range_target((-1.0, 1.0, 4.0), 2, "zero_out")
    rho = bounded_range_rho(2.0, -1.0, 1.0, 2, "zero_out")

    def ratio(p: Array, q: Array, _: Array | None) -> Array:
        return largest([both_ways(p, q, a) / (a * rho) for a in ORDERS])

    name = "clipped-log-pool, scale doubled, N = 2, zero_out"
    return Target(name, base.claim, base.mechanism, base.shape, "zero_out", ratio, True)


def _wider_target() -> Target:
    box = (math.exp(-0.5), math.exp(0.5))
    stated = _pair_target(box, 2, "zero_out", "D_α")
    wider = ClippedMixing(box[0] * 0.95, box[1] * 1.05)
    return replace(stated, name=f"{stated.name}, box 5 % wider", mechanism=wider, control=True)


def present_target() -> Target:
    """Return a control: the bound for constant N, but a mean over the present members alone.

    A missing member must answer the public model. A mechanism that divides by the number of present
    members instead loses more than this bound.
    """
    stated = _range_target((-0.25, 0.5, 2.0), 3, "zero_out")
    name = f"{stated.name}, but divided by those that are there"
    return replace(stated, name=name, adjacency="add_remove", control=True)


def targets() -> list[Target]:
    """Return all targets."""
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
    found += [_range_target((-0.25, 0.5, 2.0), 1, "zero_out")]
    found += [
        _charge_target(ClippedMixing(*box, order=4.0), 3),
        _charge_target(ClippedMixing(0.5, 4.0, order=1.5), 2),
        _charge_target(ClippedLogPool(-0.25, 0.5, 2.0), 3),
    ]
    return [*found, _halved_target(), present_target(), *ball_targets(), _wider_target()]


def attack(target: Target, steps: int, generator: np.random.Generator) -> float:
    """Return the largest ratio that the search finds."""
    with one_thread():
        return maximise(target.objective, target.shape.size, steps, generator)


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack every bound."""
    steps = effort.count(STEPS_PER_SECOND, 5)
    for index, target in enumerate(targets()):
        found = attack(target, steps, effort.generator(f"bounds/{index}"))
        yield Finding("bounds", target.name, target.claim, 1 + SLACK, found, 1.0, target.control)
