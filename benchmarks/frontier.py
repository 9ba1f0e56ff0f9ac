"""Perplexity over fixed ε, for many settings of the clipped mechanisms and the same logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from adapmixed.privacy.planner import CHOSEN_SCALE, CHOSEN_SHAPE, Plan, epsilon_of, plan
from adapmixed.privacy.search import largest_within
from adapmixed_ext.inputs import prepare

Shape = tuple[float, float]
"""Clips (a, b) of ClippedLogPool."""
Setting = tuple[float, float, float]
"""(a, b, κ) of ClippedLogPool."""
WIDEST = 40.0  # of κ(b − a)
_CHUNK = 2048  # tokens whose ratios fit into a core's cache


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
        common = (delta, models, question.queries, question.adjacency)
        return epsilon_of(*common, lower=-width, upper=0.0, scale=1.0)

    return largest_within(cost, question.epsilon, WIDEST)


def plans(question: Question, models: int, delta: float) -> list[Plan]:
    """Return the planner's chosen settings of each mechanism, which look at no text."""
    common = (delta, models, question.queries, question.adjacency)
    return plan(question.epsilon, *common, shapes=(CHOSEN_SHAPE,), scales=(CHOSEN_SCALE,))


def rule(width: float) -> Setting:
    """Return the setting a = 0 and κ = 2, a hair below this width κ(b − a); it looks at no text."""
    return 0.0, width / 2, 2 * (1 - 2.0**-40)


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
            (settings + 2, B) float32 in nats.

        Raises:
            ValueError: if a public logit is not finite.
        """
        if not bool(public.isfinite().all()):
            raise ValueError("the public model must give every token a probability")
        rows = zip(private.unbind(1), public, targets.tolist(), strict=True)
        return torch.stack([self._row(*row) for row in rows], dim=1)

    def _row(self, private: Tensor, public: Tensor, target: int) -> Tensor:
        log_q = public.log_softmax(-1)
        lse = prepare(private[:, None], public[None]).private_lse.float()
        q = log_q.exp()
        each = torch.full((1, len(private)), 1 / len(private))
        halves = {bound: torch.empty_like(log_q) for bound in self._bounds}
        for start in range(0, len(log_q) if halves else 0, _CHUNK):
            where = slice(start, start + _CHUNK)
            ratio = private[:, where] - lse
            ratio -= log_q[where]
            for bound in self._bounds:
                clipped = ratio.clamp(min(bound, 0.0), max(bound, 0.0))
                torch.mm(each, clipped, out=halves[bound][None, where])
        found = torch.empty(len(self.settings) + 2)
        for (lower, upper), (places, scales) in self._shapes.items():
            pooled = halves[lower] + halves[upper]
            # The exponent stays within ±κ max(−a, b): no largest value has to be subtracted.
            mass = (scales * pooled).exp_() @ q
            found[places] = mass.log() - scales[:, 0] * pooled[target] - log_q[target]
        found[-2] = math.log(len(private)) - (private[:, target] - lse[:, 0]).logsumexp(0)
        found[-1] = -log_q[target]
        return found
