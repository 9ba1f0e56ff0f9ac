"""Adaptive trees answered by the mechanisms themselves: their charges, their laws, one filter.

Small enough to be enumerated to the last leaf. Each node is answered in two phases, as a driver
does: what the mechanism would charge, the slots that the filter admits, then log p of every token.
At the leaf counts of models may be released with noise: of a Gaussian shifted by d, all other
things equal, Σ P^α Q^{1-α} grows by the factor e^{α(α-1) d²/(2σ²)}, so the law is exact with them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import FilterBudget, PerModelFilter
from adapmixed.rng import SeededRandom

History = tuple[int, ...]
FAR = 30.0  # a logit beyond every clip: the corners of what a slot may do


@dataclass(frozen=True)
class Leaf:
    """The probability of a transcript, and the counts that are released there, without noise."""

    mass: float
    counts: tuple[float, ...]


@dataclass(frozen=True)
class Tree:
    """An adversary whose queries, settings and counts depend on what was answered before.

    Attributes:
        mechanisms: which of them answers depends on the history.
        budget: of every model.
        thresholds: of the counts at the end, one reserved release each, of noise `sigma`.
    """

    mechanisms: tuple[Mechanism, ...]
    seed: int
    models: int
    vocab: int
    depth: int
    budget: FilterBudget
    thresholds: tuple[float, ...] = ()
    sigma: float | None = None

    def node(self, history: History) -> tuple[Tensor, Tensor]:
        """(private (N, V), public (V,)) logits of the query after this history."""
        rng = np.random.default_rng([self.seed, len(history), *history])
        public = np.log(rng.dirichlet(np.full(self.vocab, 4.0)))
        raised = rng.random((self.models, self.vocab)) < rng.choice([0.2, 0.5, 0.8])
        private = public + np.where(raised, FAR, -FAR)
        return torch.from_numpy(private).float(), torch.from_numpy(public).float()

    def leaves(self, emptied: int | None = None) -> dict[History, Leaf]:
        """Every transcript; slot `emptied` is the public model throughout."""
        filter_ = PerModelFilter(
            self.models, self.budget, releases=len(self.thresholds), sigma=self.sigma
        )
        level: dict[History, tuple[float, PerModelFilter]] = {(): (1.0, filter_)}
        for _ in range(self.depth):
            below = {}
            for index, mechanism in enumerate(self.mechanisms):
                asked = [h for h in level if sum(h) % len(self.mechanisms) == index]
                filters = [copy.deepcopy(level[h][1]) for h in asked]
                laws = self._answer(mechanism, asked, filters, emptied) if asked else []
                for history, after, law in zip(asked, filters, laws, strict=True):
                    for token, p in enumerate(law):
                        below[(*history, token)] = (level[history][0] * p, after)
            level = below
        # The filter of a node is shared by its children: each counts with a copy.
        leaves = {}
        for history, (mass, last) in level.items():
            counting = copy.deepcopy(last)
            counts = tuple(counting.noisy_count(x, 0.0) for x in self.thresholds)
            leaves[history] = Leaf(mass, counts)
        return leaves

    def _answer(
        self,
        mechanism: Mechanism,
        asked: Sequence[History],
        filters: Sequence[PerModelFilter],
        emptied: int | None,
    ) -> list[list[float]]:
        """The law after each history; what is charged goes to its filter."""
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
        own = charges[:, :: self.vocab].cpu().numpy()
        admitted = [filter_.admit(own[:, [place]])[:, 0] for place, filter_ in enumerate(filters)]
        active = torch.from_numpy(np.stack(admitted, axis=1)).repeat_interleave(self.vocab, 1)
        proposal.events(active)
        found = proposal.release(active).log_prob
        assert found is not None
        laws: list[list[float]] = found.exp().view(len(asked), self.vocab).tolist()
        return laws

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
