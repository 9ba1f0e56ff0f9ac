"""Adaptive trees answered by the mechanisms themselves: their charges, their laws, one filter.

Small enough to be enumerated to the last leaf. Each node is answered in two phases, as a driver
does: what the mechanism would charge, the slots that the filter admits, then log p of every token.
At the leaf counts of models may be released with noise: of a Gaussian shifted by d, all other
things equal, Σ P^α Q^{1-α} grows by the factor e^{α(α-1) d²/(2σ²)}, so the law is exact with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adapmixed.audit.search import Array
from adapmixed.audit.trees import charge_of
from adapmixed.mechanisms import ClippedMixing, Mechanism
from adapmixed.privacy import FilterBudget, PerModelFilter
from adapmixed.rng import SeededRandom

History = tuple[int, ...]


class _Telling(PerModelFilter):
    """Its counts have no noise."""

    def _noise(self, sigma: float, rng: object) -> int:
        return 0


FAR = 30.0  # a logit beyond every clip: the corners of what a slot may do


@dataclass(frozen=True)
class Leaf:
    """The probability of a transcript, and the counts that are released there, without noise."""

    mass: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """An adversary whose queries, settings and counts depend on what was answered before.

    Attributes:
        mechanisms: which of them answers depends on the history.
        budget: of every model.
        thresholds: of the counts at the end, one reserved release each, of noise `sigma`.
        told: the part of every charge that the filter is told; less than 1 in controls.
    """

    mechanisms: tuple[Mechanism, ...]
    seed: int
    models: int
    vocab: int
    depth: int
    budget: FilterBudget
    thresholds: tuple[float, ...] = ()
    sigma: float | None = None
    told: float = 1.0

    def node(self, history: History) -> tuple[Tensor, Tensor]:
        """(private (N, V), public (V,)) logits of the query after this history."""
        rng = np.random.default_rng([self.seed, len(history), *history])
        public = np.log(rng.dirichlet(np.full(self.vocab, 4.0)))
        raised = rng.random((self.models, self.vocab)) < rng.choice([0.2, 0.5, 0.8])
        private = public + np.where(raised, FAR, -FAR)
        return torch.from_numpy(private).float(), torch.from_numpy(public).float()

    def leaves(self, emptied: int | None = None) -> dict[History, Leaf]:
        """Every transcript; slot `emptied` is the public model throughout."""
        level: dict[History, tuple[float, Array]] = {(): (1.0, np.zeros((self.models, 0)))}
        for _ in range(self.depth):
            below = {}
            for index, mechanism in enumerate(self.mechanisms):
                asked = [h for h in level if sum(h) % len(self.mechanisms) == index]
                if not asked:
                    continue
                charges, laws = self._answer(
                    mechanism, asked, [level[h][1] for h in asked], emptied
                )
                for history, charged, law in zip(asked, charges, laws, strict=True):
                    for token, p in enumerate(law):
                        below[(*history, token)] = (level[history][0] * p, charged)
            level = below
        return {history: Leaf(mass, self._counts(own)) for history, (mass, own) in level.items()}

    def _filter(self, charges: Array) -> tuple[PerModelFilter, NDArray[np.bool_]]:
        """A filter after answers with these charges (N, t), and who contributed to them."""
        budget = replace(self.budget, releases=len(self.thresholds), sigma=self.sigma)
        filter_ = _Telling(self.models, budget)
        return filter_, filter_.admit(charges)

    def _counts(self, charges: Array) -> tuple[int, ...]:
        """What is released after them, without noise."""
        filter_, _ = self._filter(charges)
        rng = SeededRandom(0)
        return tuple(filter_.noisy_count(x, rng=rng) for x in self.thresholds)

    def _answer(
        self,
        mechanism: Mechanism,
        asked: Sequence[History],
        before: Sequence[Array],
        emptied: int | None,
    ) -> tuple[list[Array], list[list[float]]]:
        """The charges (N, t) up to and with this answer and its law, after each history."""
        nodes = [self.node(history) for history in asked]
        private = torch.stack([rows for rows, _ in nodes], dim=1)
        public = torch.stack([row for _, row in nodes])
        if emptied is not None:
            private[emptied] = public
        # One position for each token, so that its probability can be asked for.
        every = torch.arange(self.vocab).repeat(len(asked))
        proposal = mechanism.propose(
            private.repeat_interleave(self.vocab, 1),
            public.repeat_interleave(self.vocab, 0),
            targets=every,
            rng=SeededRandom(0),
        )
        charges = proposal.individual_charges
        assert charges is not None
        own = self.told * charges[:, :: self.vocab].cpu().numpy()
        after = [np.hstack((earlier, own[:, [k]])) for k, earlier in enumerate(before)]
        admitted = [self._filter(charged)[1][:, -1] for charged in after]
        active = torch.from_numpy(np.stack(admitted, axis=1)).repeat_interleave(self.vocab, 1)
        proposal.events(active)
        found = proposal.release(active).log_prob
        assert found is not None
        laws: list[list[float]] = found.exp().view(len(asked), self.vocab).tolist()
        return after, laws

    def divergence(self, orders: Sequence[float], sigma: float | None = None) -> float:
        """The largest D_α(P ‖ P°)/(what the budget allows at α), both ways, any slot emptied.

        Args:
            orders: α; under a budget in "renyi" its own alone.
            sigma: the noise that the counts have, where it is not what was paid for.
        """
        here, noise = self.leaves(), sigma or self.sigma
        largest = 0.0
        for slot in range(self.models):
            there = self.leaves(slot)
            for order in orders:
                allowed = self.budget.amount * (order if self.budget.order is None else 1.0)
                both = max(_renyi(here, there, order, noise), _renyi(there, here, order, noise))
                largest = max(largest, both / allowed)
        return largest


@dataclass(frozen=True)
class ExtremalTree(Tree):
    """Every query is the dominating pair of one box: no answer loses more of what it is charged.

    Of three tokens two have mass π = (1-c)/(C-c): slot 0 is C q on one of them, every other slot on
    the other, and c q elsewhere. Which tokens these are depends on the history. By the lemma of
    docs/privacy.md, section 13, slot 0 loses its charge where the others are c q, and the sum of
    `depth` answers is the sum of their charges until it has spent its budget.
    """

    def node(self, history: History) -> tuple[Tensor, Tensor]:
        """As :meth:`Tree.node`."""
        (box,) = self.mechanisms
        assert isinstance(box, ClippedMixing)
        rng = np.random.default_rng([self.seed, len(history), *history])
        own, others, rest = rng.permutation(3)
        share = (1 - box.lower) / (box.upper - box.lower)
        public = np.log([share, share, 1 - 2 * share])[np.argsort([own, others, rest])]
        private = np.tile(public - FAR, (self.models, 1))
        private[0, own] += 2 * FAR
        private[1:, others] += 2 * FAR
        return torch.from_numpy(private).float(), torch.from_numpy(public).float()

    @staticmethod
    def charge(box: ClippedMixing, models: int) -> float:
        """Of slot 0, by the formula, in float64."""
        assert box.charge_order is not None
        share = (1 - box.lower) / (box.upper - box.lower)
        q, u = np.array([share, 1 - share]), np.array([box.upper, box.lower])
        return float(charge_of(q, (q * u)[None], box.lower, box.charge_order, models)[0])


def _renyi(
    p: dict[History, Leaf], q: dict[History, Leaf], order: float, sigma: float | None
) -> float:
    """D_order of two laws of transcripts, the noisy counts included."""
    terms = []
    for history, leaf in p.items():
        other = q[history]
        log = order * math.log(leaf.mass) + (1 - order) * math.log(other.mass)
        if sigma is not None:
            shifts = (a - b for a, b in zip(leaf.counts, other.counts, strict=True))
            log += order * (order - 1) * sum(d * d for d in shifts) / (2 * sigma * sigma)
        terms.append(math.exp(log))
    return math.log(math.fsum(terms)) / (order - 1)
