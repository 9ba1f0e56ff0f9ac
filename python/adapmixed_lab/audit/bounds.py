"""Bounds: a search for ensembles whose true loss exceeds what is charged for them.

The distributions are those that the mechanisms draw from. Losses are computed here, in float64. A
finding is the largest ratio of a true loss to its bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

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
from adapmixed.privacy.rounding import up
from adapmixed.rng import SeededRandom
from adapmixed_lab.audit import search
from adapmixed_lab.audit.finding import SLACK, Effort, Finding
from adapmixed_lab.audit.search import Array
from adapmixed_lab.reproduce.published import published_bound

STEPS_PER_SECOND = 6.0  # of each search
ORDERS = (1.5, 2.0, 8.0, 64.0)
DELTAS = (0.5, 0.1, 0.01)
ADJACENCIES = ("zero_out", "replace_one")
BOX = (math.exp(-0.5), math.exp(0.5))
RESOLVED = 1e-13
"""Resolution of a divergence that is summed in float64."""

OWN_CHARGE = "true loss / its own charge"
SOUND = "true D_α / sound bound"

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
        answers: computes the distributions (B, V) of a mechanism over ensembles.
    """

    name: str
    claim: str
    mechanism: Mechanism
    shape: tuple[int, int]
    ratio: Ratio
    adjacency: str = "zero_out"
    control: bool = False
    charge: Callable[[Mechanism, Tensor, Tensor], Array] | None = None
    answers: Callable[[Mechanism, Tensor, Tensor], Array] = search.distribution

    def objective(self, vectors: Array) -> Array:
        """Return the ratios of the ensembles that the vectors encode; +inf for any NaN."""
        models, vocab = self.shape
        members, public = search.unpacked(vectors, models + 1, vocab)
        private = members[:-1]
        there = search.neighbour(private, public, members[-1], self.adjacency)
        charge = np.ones(len(vectors))
        if self.charge is not None:
            charge = np.maximum(self.charge(self.mechanism, private, public), 1e-300)
        with np.errstate(all="ignore"):
            p = self.answers(self.mechanism, private, public)
            q = self.answers(self.mechanism, there, public)
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
        deltas = {
            e: float(search.hockey_stick(np.array(pair.p), np.array(pair.q), e)) for e in epsilons
        }
        ratio = sticks({epsilon: delta for epsilon, delta in deltas.items() if delta > 1e-6})
    else:
        both = (pair, pair.exchanged())
        ratio = divergences({a: max(one.renyi(a) for one in both) for a in ORDERS})
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
    own = lambda *given: search.charged(*given)[0]  # noqa: E731
    return Target(name, OWN_CHARGE, mechanism, (models, 3), ratio, charge=own)


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
    own = lambda *given: search.realised(*given).loss[0, :, 0]  # noqa: E731
    ratio = divergences({order: 1.0})
    return Target(name, OWN_CHARGE, mechanism, (3, 3), ratio, adjacency, control, own)


def _fixed(order: float, radius: float) -> AdaPMixED:
    """Return AdaPMixED's projection with its fixed bound, which holds for zero-out alone."""
    return AdaPMixED(order, radius / order, screen=None, loss="fixed")


def _fixed_target(order: float, models: int, adjacency: str) -> Target:
    """Return an attack on the bound that is charged.

    With "add_remove" it is a control: the mechanism divides by the number of present members.
    """
    mechanism, rows = _fixed(order, 0.05 * order), (torch.zeros(models, 1, 2), torch.zeros(1, 2))
    events = mechanism.propose(*rows, rng=SeededRandom(0))._events
    (bound,) = (one.epsilon for one in events if isinstance(one, RenyiBound))
    name = f"adapmixed, loss='fixed', α = {order:g}, N = {models}, {adjacency}"
    claim, ratio = "true D_α / the bound that is charged", divergences({order: bound})
    control = adjacency != "zero_out"
    return Target(name, claim, mechanism, (models, 2), ratio, adjacency, control)


def _ball_target(mechanism: PMixED, models: int, rate: float) -> Target:
    """Return an attack on the theorem, with hidden subsets of the members if `rate` < 1."""

    def answers(mechanism: Mechanism, private: Tensor, public: Tensor) -> Array:
        nobody = search.distribution(mechanism, public[None], public)  # q
        return rate * search.distribution(mechanism, private, public) + (1 - rate) * nobody

    order = mechanism.order
    ratio = divergences({order: sound_bound(order, mechanism.radius(models), models, rate)})
    name = f"pmixed α = {order:g}, rate {rate:g}, N = {models}, zero_out"
    return Target(name, SOUND, mechanism, (models, 3), ratio, answers=answers)


def _subset_target(order: float, models: int, rate: float, divisor: str) -> Target:
    """Return an attack on the bound for hidden random subsets, which are all enumerated.

    Each member is drawn with probability `rate`. It is a control unless the answer is divided by
    the "subset" or the "slots".
    """
    control = divisor not in ("subset", "slots")
    amplified = rate if control else amplification_rate(rate, models, divisor)

    def answers(mechanism: Mechanism, private: Tensor, public: Tensor) -> Array:
        found: Array = np.zeros(public.shape)
        nobody = search.distribution(mechanism, public[None], public)  # q
        for drawn in product((False, True), repeat=len(private)):
            taken, count = sum(drawn), len(drawn)
            answer = nobody
            if taken:
                answer = search.distribution(mechanism, private[list(drawn)], public)
            if divisor == "slots":
                answer = (taken * answer + (count - taken) * nobody) / count
            found += rate**taken * (1 - rate) ** (count - taken) * answer
        return found

    ratio = divergences({order: sound_bound(order, order, models, amplified)})
    name = f"α = {order:g}, subsets at rate {rate:g}, divided by {divisor}, N = {models}, zero_out"
    ball = _fixed(order, order)
    return Target(name, SOUND, ball, (models, 2), ratio, control=control, answers=answers)


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
    found = [
        _pair_target(BOX, models, adjacency, measure)
        for adjacency in ADJACENCIES
        for models in (1, 3)
        for measure in ("δ(ε)", "D_α")
    ]
    for adjacency in ADJACENCIES:
        found += [_pair_target(other, 2, adjacency, "δ(ε)") for other in ((0.1, 1.05), (0.5, 4.0))]
        found.append(_range_target((-0.25, 0.5, 2.0), 3, adjacency))
    found += [
        _range_target((-0.25, 0.5, 2.0), 1, "zero_out"),
        _charge_target(ClippedMixing(*BOX, order=4.0), 3),
        _charge_target(ClippedMixing(0.5, 4.0, order=1.5), 2),
        _charge_target(ClippedLogPool(-0.25, 0.5, 2.0), 3),
        _ball_target(PMixED(8.0, 1e-5, 10, 3.0), 3, 1.0),
        _ball_target(PMixED(8.0, 1e-5, 10, 6.0), 1, 1.0),
        _ball_target(PMixED(8.0, 1e-5, 10, 18.0), 4, 0.3),
        *(_realised_target(one, one.adjacency) for one in (added, emptied, other)),
        _fixed_target(3.0, 3, "zero_out"),
        _fixed_target(8.0, 1, "zero_out"),
        _subset_target(2.0, 3, 0.5, "subset"),
        _subset_target(2.0, 2, 0.8, "slots"),
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
        *found,
        Target(
            "published PMixED bound, N = 4, add_remove", "true D_α / published bound",
            paper, (4, 2), published, "add_remove", True,
        ),
        _realised_target(emptied, "add_remove"),
        _fixed_target(3.0, 4, "add_remove"),
        _subset_target(2.0, 3, 0.5, "subset, amplified at its rate"),
        Target(name, "true D_α / bound", _fixed(3.0, 0.15), (1, 2), twice, "replace_one", True),
        replace(box, name=f"{box.name}, box 5 % wider", mechanism=wider, control=True),
        replace(doubled, name=sharp, mechanism=sharper, control=True),
        replace(pool, name=there, adjacency="add_remove", control=True),
    ]  # fmt: skip


def attack(target: Target, steps: int, generator: np.random.Generator) -> float:
    """Return the largest ratio that the search finds."""
    models, vocab = target.shape
    return search.maximise(target.objective, (models + 2) * vocab, steps, generator)[1]


def audit(effort: Effort) -> Iterator[Finding]:
    """Attack every bound."""
    steps = effort.count(STEPS_PER_SECOND, 5)
    for index, target in enumerate(targets()):
        found = attack(target, steps, effort.generator(f"bounds/{index}"))
        yield Finding("bounds", target.name, target.claim, 1 + SLACK, found, 1.0, target.control)


def amplification_rate(sample_rate: float, num_models: int, divide_by: str) -> float:
    """Return g in [0, 1] such that a hidden Poisson subset weighs each member by g/N.

    The subset S holds each member with probability s, the `sample_rate`. With "slots" the answer is
    (1/N)[Σ_{i∈S} p̄_i + (N-|S|) q], so g = s. With "subset" it is Σ_{i∈S} p̄_i / |S|, or q if S is
    empty, so g = 1 - (1-s)^N, rounded up: dividing by |S| undoes the subsampling. Proof:
    docs/theory/pmixed.md.
    """
    if divide_by == "slots" or sample_rate in (0.0, 1.0):
        return sample_rate
    exponent = num_models * math.log1p(-sample_rate)
    return min(1.0, up(-math.expm1(exponent - 4 * math.ulp(exponent))))
