"""Perplexity over fixed ε, for many settings of the clipped mechanisms and the same logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE, epsilon_of, plan
from adapmixed.privacy.search import largest_within

Shape = tuple[float, float]
"""Clips (a, b) of ClippedLogPool."""
Setting = tuple[float, float, float]
"""(a, b, κ) of ClippedLogPool."""
Box = tuple[float, float]
"""Density ratios (c, C) of ClippedMixing."""

WIDEST = 40.0  # of κ(b − a)


@dataclass(frozen=True)
class Question:
    """A number of answers and what they may reveal.

    Attributes:
        queries: T.
        adjacency: "zero_out" or "replace_one".
        epsilon: ε.
    """

    queries: int
    adjacency: str
    epsilon: float


@cache
def widest(question: Question, models: int, delta: float) -> float:
    """Return the largest width κ(b − a) that keeps ε: ε depends on the width alone."""

    def cost(width: float) -> float:
        return cost_of(width, question.queries, question.adjacency, models, delta)

    return largest_within(cost, question.epsilon, WIDEST)


def cost_of(width: float, queries: int, adjacency: str, models: int, delta: float) -> float:
    """Return ε of `queries` answers of a pool of this width κ(b − a)."""
    common = (delta, models, queries, adjacency)
    return epsilon_of(*common, lower=-width, upper=0.0, scale=1.0)


def setting(shape: Shape, width: float) -> Setting:
    """Return the setting with these clips and this width κ(b − a), a hair below it."""
    lower, upper = shape
    return lower, upper, width / (upper - lower) * (1 - 2.0**-40)


@cache
def planned(question: Question, models: int, delta: float) -> Setting:
    """Return the planner's chosen pool, which depends on public numbers alone."""
    (found,) = (
        one
        for one in plan(
            question.epsilon, delta, models, question.queries, question.adjacency,
            shapes=(), scales=(CHOSEN_SCALE,),
        )
        if one.mechanism == "clipped-log-pool"
    )  # fmt: skip
    return found.settings["lower"], found.settings["upper"], found.settings["scale"]


@cache
def planned_box(question: Question, models: int, delta: float) -> Box:
    """Return the planner's chosen box of ClippedMixing."""
    (found,) = (
        one
        for one in plan(
            question.epsilon, delta, models, question.queries, question.adjacency,
            shapes=(CHOSEN_SHAPE,), scales=(),
        )
        if one.mechanism == "clipped-mixing"
    )  # fmt: skip
    return found.settings["lower"], found.settings["upper"]


def rule(width: float) -> Setting:
    """Return the rule of thumb for a width: a = 0 and κ = 4, or a lower κ that keeps b ≥ 1/4."""
    return setting((0.0, max(0.25, width / 4)), width)


def choose(losses: Mapping[Setting, float], shapes: Sequence[Shape], width: float) -> Setting:
    """Return the setting of least loss among those of a width, one of each shape."""
    return min((setting(shape, width) for shape in shapes), key=lambda one: losses[one])


class Scorer:
    """Scores of many settings for the same rows: the clipped sums are computed once.

    Σ clip(x, a, b) = Σ clip(x, a, 0) + Σ clip(x, 0, b), so settings share their halves.
    """

    def __init__(self, settings: Sequence[Setting]) -> None:
        """Prepare settings, each once."""
        self.settings = list(settings)
        places: dict[Shape, list[int]] = {}
        for place, (lower, upper, _) in enumerate(self.settings):
            places.setdefault((lower, upper), []).append(place)
        self._shapes = {
            shape: (torch.tensor(at), torch.tensor([[self.settings[i][2]] for i in at]))
            for shape, at in places.items()
        }
        self._bounds = sorted({bound for shape in self._shapes for bound in shape})

    def losses(self, private: Tensor, public: Tensor, targets: Tensor) -> Tensor:
        """Return −log p(target) of every setting, then of the unprotected and the public model.

        Args:
            private: (N, B, V) logits.
            public: (B, V) logits, all finite.
            targets: (B,) int64.

        Returns:
            (settings + 2, B) in nats.

        Raises:
            ValueError: if a public logit is not finite.
        """
        if not bool(public.isfinite().all()):
            raise ValueError("the public model must give every token a probability")
        rows = zip(private.unbind(1), public, targets.tolist(), strict=True)
        # The ratios of one row fit into a core's cache.
        return torch.stack([self._row(*row) for row in rows], dim=1)

    def _row(self, private: Tensor, public: Tensor, target: int) -> Tensor:
        log_p, log_q = private.log_softmax(-1), public.log_softmax(-1)
        ratio, q = log_p - log_q, log_q.exp()
        each = torch.full((1, len(private)), 1 / len(private))
        room = torch.empty_like(ratio)
        halves: dict[float, Tensor] = {}
        for bound in self._bounds:
            torch.clamp(ratio, min(bound, 0.0), max(bound, 0.0), out=room)
            halves[bound] = (each @ room)[0]
        found = torch.empty(len(self.settings) + 2)
        for (lower, upper), (places, scales) in self._shapes.items():
            pooled = halves[lower] + halves[upper]
            # The exponent stays within ±κ max(−a, b): no largest value has to be subtracted.
            mass = (scales * pooled).exp_() @ q
            found[places] = mass.log() - scales[:, 0] * pooled[target] - log_q[target]
        found[-2] = math.log(len(private)) - log_p[:, target].logsumexp(0)
        found[-1] = -log_q[target]
        return found


class BoxScorer:
    """Scores of ClippedMixing with many boxes, by the mechanism's own operators."""

    def __init__(self, settings: Sequence[Box]) -> None:
        """Prepare boxes, each once."""
        self.settings = list(settings)

    def losses(self, private: Tensor, public: Tensor, targets: Tensor) -> Tensor:
        """Return −log p(target) of every box, (boxes, B) in nats; arguments as of `Scorer`."""
        private = private.contiguous()
        found = []
        for lower, upper in self.settings:
            clipping = ops.clip_project(private, public, lower=lower, upper=upper).check()
            found.append(-ops.log_prob(private, public, clipping, targets))
        return torch.stack(found)


def crossing(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the least x at which a curve falls to `level`, or None if it never does.

    Args:
        points: (x > 0, y > 0) of the curve, straight between points if both axes are logarithmic.
        level: > 0.
    """
    ordered = sorted(points)
    for at, (x, y) in enumerate(ordered):
        if y <= level:
            if at == 0:
                return x
            before, above = ordered[at - 1]
            share = math.log(above / level) / math.log(above / y)
            return before * (x / before) ** share
    return None
