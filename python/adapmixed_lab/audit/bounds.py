"""Bounds: a search for ensembles whose true loss exceeds what is charged for them.

The distributions are those that the mechanisms draw from. Losses are computed here, in float64. A
finding is the largest ratio of a true loss to its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, ClippedLogPool, ClippedMixing, Mechanism, PMixED
from adapmixed.privacy import RenyiBound
from adapmixed.privacy.conversions import replace_one_epsilon
from adapmixed.privacy.costs import (
    accounted_box,
    bounded_range_rho,
    clipped_mixing_pair,
    sound_bound,
)
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import SLACK, Effort, Finding, search
from adapmixed_lab.audit.search import FAR, Array
from adapmixed_lab.reproduce.published import FixedLoss, published_bound

STEPS_PER_SECOND = 6.0  # of each search
STARTS = 128
ORDERS = (1.5, 2.0, 8.0, 64.0)
DELTAS = (0.5, 0.1, 0.01)
ADJACENCIES = ("zero_out", "replace_one")
BOX = (math.exp(-0.5), math.exp(0.5))
RESOLVED = 1e-13
"""Resolution of a divergence that is summed in float64."""

OWN_CHARGE = "true loss / its own charge"

Ratio = Callable[[Array, Array, Array], Array]
"""True loss / bound, from the two distributions (B, V) and member 0's charges (B,)."""


@dataclass(frozen=True)
class Target:
    """A bound on the loss between neighbours.

    Attributes:
        name, claim: of the finding.
        mechanism: answers the queries.
        shape: (N, V).
        ratio: of the true loss to the bound.
        adjacency: as in `search.neighbour`.
        control: whether the bound is deliberately wrong.
        charge: computes member 0's charges (B,); None if the bound needs none.
    """

    name: str
    claim: str
    mechanism: Mechanism
    shape: tuple[int, int]
    ratio: Ratio
    adjacency: str = "zero_out"
    control: bool = False
    charge: Callable[[Mechanism, Tensor, Tensor], Array] | None = None

    def objective(self, vectors: Array) -> Array:
        """Return the ratios of the ensembles that the vectors encode; +inf for any NaN."""
        models, vocab = self.shape
        rows = torch.from_numpy(vectors).float().view(-1, models + 2, vocab)
        public, *members, other = rows.transpose(0, 1).contiguous()
        private = torch.stack(members)
        there = search.neighbour(private, public, other, self.adjacency)
        charge = np.ones(len(vectors))
        if self.charge is not None:
            charge = np.maximum(self.charge(self.mechanism, private, public), 1e-300)
        with np.errstate(all="ignore"):
            p = search.distribution(self.mechanism, private, public)
            q = search.distribution(self.mechanism, there, public)
            ratio = self.ratio(p, q, charge)
        bad = np.isnan(ratio) | np.isnan(p).any(-1) | np.isnan(q).any(-1)
        return np.where(bad, math.inf, ratio)


def divergences(bounds: Mapping[float, float]) -> Ratio:
    """Return the ratio to a bound on the Rényi divergence at each order, of a charge of 1."""
    return lambda p, q, charge: np.max(
        [(search.both_ways(p, q, a) - RESOLVED) / (b * charge) for a, b in bounds.items()], axis=0
    )


def sticks(bounds: Mapping[float, float]) -> Ratio:
    """Return the ratio to a bound on δ at each ε."""
    return lambda p, q, _: np.max(
        [search.hockey_stick(p, q, e) / b for e, b in bounds.items()], axis=0
    )


def _pair_target(box: tuple[float, float], models: int, adjacency: str, measure: str) -> Target:
    pair = clipped_mixing_pair(*accounted_box(*box), models, adjacency)
    if measure == "δ(ε)":
        epsilons = [0.0] + [pair.largest_loss() * share for share in (0.2, 0.5, 0.8)]
        p, q = np.array(pair.atoms).T
        deltas = {e: float(search.hockey_stick(p, q, e)) for e in epsilons}
        ratio = sticks({epsilon: delta for epsilon, delta in deltas.items() if delta > 1e-6})
    else:
        both = (pair, pair.exchanged())
        ratio = divergences({a: max(side.renyi(a) for side in both) for a in ORDERS})
    name = f"clipped-mixing [{box[0]:.3g}, {box[1]:.3g}], N = {models}, {adjacency}"
    claim = f"true {measure} / that of the pair"
    return Target(name, claim, ClippedMixing(*box), (models, 4), ratio, adjacency)


def _range_target(setting: tuple[float, float, float], models: int, adjacency: str) -> Target:
    lower, upper, scale = setting
    rho = bounded_range_rho(scale, lower, upper, models, adjacency)
    ratio = divergences({order: order * rho for order in ORDERS})
    name = f"clipped-log-pool [{lower:g}, {upper:g}] · {scale:g}, N = {models}, {adjacency}"
    pool = ClippedLogPool(*setting)
    return Target(name, "true D_α / (α ρ)", pool, (models, 3), ratio, adjacency)


def _charge_target(mechanism: Mechanism, models: int) -> Target:
    order = mechanism.order if isinstance(mechanism, ClippedMixing) else None
    ratio = divergences({order: 1.0} if order is not None else {a: a for a in ORDERS})
    name = f"{mechanism.name}, member 0 of {models}, zero_out"
    return Target(name, OWN_CHARGE, mechanism, (models, 3), ratio, charge=search.charged)


def _realised_target(mechanism: AdaPMixED, adjacency: str) -> Target:
    """Return an attack on the loss that the accountant adds.

    It is a control if `adjacency` is not the mechanism's own.
    """
    (order,) = mechanism.loss_orders or (mechanism.order,)
    control = adjacency != mechanism.adjacency
    name = f"adapmixed α = {mechanism.order:g}, member 0 of 3, {adjacency}"
    if order != mechanism.order:
        name += f", loss at order {order:g}"
    if control:
        name += f", its loss that of {mechanism.adjacency}"
    charge = lambda *inputs: search.realised(*inputs).loss[0, :, 0]  # noqa: E731
    ratio = divergences({order: 1.0})
    return Target(name, OWN_CHARGE, mechanism, (3, 3), ratio, adjacency, control, charge)


def _fixed(order: float, radius: float) -> FixedLoss:
    """Return AdaPMixED's projection with a fixed bound, which holds for zero-out alone."""
    return FixedLoss(order, radius / order, screen=None)


def _fixed_target(order: float, models: int, adjacency: str) -> Target:
    """Return an attack on the bound that is charged.

    With "add_remove" it is a control: the mechanism divides by the number of present members.
    """
    mechanism, rows = _fixed(order, 0.05 * order), (torch.zeros(models, 1, 2), torch.zeros(1, 2))
    events = mechanism.propose(*rows, rng=SeededRandom(0))._events
    (bound,) = (event.epsilon for event in events if isinstance(event, RenyiBound))
    name = f"adapmixed, fixed loss, α = {order:g}, N = {models}, {adjacency}"
    claim, ratio = "true D_α / the bound that is charged", divergences({order: bound})
    control = adjacency != "zero_out"
    return Target(name, claim, mechanism, (models, 2), ratio, adjacency, control)


def _ball_target(mechanism: PMixED, models: int) -> Target:
    order = mechanism.order
    ratio = divergences({order: sound_bound(order, mechanism.radius(models), models)})
    name = f"pmixed α = {order:g}, N = {models}, zero_out"
    return Target(name, "true D_α / sound bound", mechanism, (models, 3), ratio)


def _replaced_target(order: float, models: int) -> Target:
    """Return an attack on (2ε, (1 + e^ε) δ) for replace-one, derived through the emptied shard.

    Budgets and the planner state replace-one in this form.
    """
    spent = sound_bound(order, 0.5, models)
    ratio = sticks({replace_one_epsilon(order, spent, delta): delta for delta in DELTAS})
    name = f"through the emptied shard, α = {order:g}, N = {models}, replace_one"
    ball = _fixed(order, 0.5)
    return Target(name, "true δ(ε) / δ", ball, (models, 2), ratio, "replace_one")


def targets() -> list[Target]:
    """Return all targets."""
    emptied = AdaPMixED(18.0, 0.1, screen=None)
    added = replace(emptied, adjacency="add_remove")
    other = AdaPMixED(3.0, 0.2, screen=None, loss_orders=(8.0,), adjacency="add_remove")
    claims = [
        _pair_target(BOX, models, adjacency, measure)
        for adjacency in ADJACENCIES
        for models in (1, 3)
        for measure in ("δ(ε)", "D_α")
    ]
    for adjacency in ADJACENCIES:
        claims += [_pair_target(other, 2, adjacency, "δ(ε)") for other in ((0.1, 1.05), (0.5, 4.0))]
        claims.append(_range_target((-0.25, 0.5, 2.0), 3, adjacency))
    claims += [
        _range_target((-0.25, 0.5, 2.0), 1, "zero_out"),
        _charge_target(ClippedMixing(*BOX, order=4.0), 3),
        _charge_target(ClippedMixing(0.5, 4.0, order=1.5), 2),
        _charge_target(ClippedLogPool(-0.25, 0.5, 2.0), 3),
        _ball_target(PMixED(8.0, 1e-5, 10, 3.0), 3),
        _ball_target(PMixED(8.0, 1e-5, 10, 6.0), 1),
        *(_realised_target(rule, rule.adjacency) for rule in (added, emptied, other)),
        _fixed_target(3.0, 3, "zero_out"),
        _fixed_target(8.0, 1, "zero_out"),
        _replaced_target(6.0, 1),
        _replaced_target(3.0, 2),
    ]
    # Controls. The bound for constant N holds only if a missing member answers the public model.
    box = _pair_target(BOX, 2, "zero_out", "D_α")
    doubled = _range_target((-1.0, 1.0, 2.0), 2, "zero_out")
    pool = _range_target((-0.25, 0.5, 2.0), 3, "zero_out")
    wider, sharper = ClippedMixing(BOX[0] * 0.95, BOX[1] * 1.05), ClippedLogPool(-1.0, 1.0, 4.0)
    sharp = "clipped-log-pool, scale doubled, N = 2, zero_out"
    there = f"{pool.name}, but divided by those that are there"
    # The published data-independent bound is not valid, and twice the Rényi bound of an emptied
    # shard bounds no replacement.
    paper = AdaPMixED(3.0, 0.01, screen=None, adjacency="add_remove")
    published = divergences({3.0: published_bound(3.0, 0.01, 4)})
    twice = divergences({3.0: 2 * sound_bound(3.0, 0.15, 1)})
    name = "twice the Rényi bound of an emptied shard, α = 3, N = 1, replace_one"
    return [
        *claims,
        Target(
            "published PMixED bound, N = 4, add_remove", "true D_α / published bound",
            paper, (4, 2), published, "add_remove", True,
        ),
        _realised_target(emptied, "add_remove"),
        _fixed_target(3.0, 4, "add_remove"),
        Target(name, "true D_α / bound", _fixed(3.0, 0.15), (1, 2), twice, "replace_one", True),
        replace(box, name=f"{box.name}, box 5 % wider", mechanism=wider, control=True),
        replace(doubled, name=sharp, mechanism=sharper, control=True),
        replace(pool, name=there, adjacency="add_remove", control=True),
    ]  # fmt: skip


@search.one_thread()
def attack(target: Target, steps: int, generator: np.random.Generator) -> float:
    """Return the largest ratio that a search over all logits finds.

    The search starts from `STARTS` ensembles of very different spread. Each step changes some
    logits of every ensemble at random, and keeps a change that is better. Changes shrink over time.
    Several times the worse half starts again from the better half.
    """
    models, vocab = target.shape
    size = (models + 2) * vocab
    spread = generator.choice([0.3, 2.0, 8.0, 20.0], (STARTS, 1))
    best = np.clip(spread * generator.normal(size=(STARTS, size)), -FAR, FAR)
    values = target.objective(best)
    for step in range(steps):
        width = 8.0 * 2.0 ** (-9 * step / steps)
        moved = generator.random(best.shape) < 2 / size + 0.3 * generator.random((STARTS, 1))
        trial = best + width * moved * generator.standard_t(2, best.shape)
        trial = np.clip(trial, -FAR, FAR)
        ratios = target.objective(trial)
        better = ratios > values
        best[better], values[better] = trial[better], ratios[better]
        if step % max(1, steps // 5) == steps // 5 - 1:
            order = np.argsort(values)
            best[order[: STARTS // 2]] = best[order[STARTS // 2 :]]
            values[order[: STARTS // 2]] = values[order[STARTS // 2 :]]
    return float(values.max())


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack every bound."""
    steps = effort.count(STEPS_PER_SECOND, 5)
    for index, target in enumerate(targets()):
        measured = attack(target, steps, effort.generator(f"bounds/{index}"))
        yield Finding("bounds", target.name, target.claim, 1 + SLACK, measured, 1.0, target.control)
