"""A bound under attack: the encoding of ensembles, and the ratio of loss to bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, Mechanism
from adapmixed_lab.audit.search import Array, Shape, charged, distribution, neighbour, realised

RESOLVED = 1e-13
"""Resolution of a divergence that is summed in float64."""


@dataclass(frozen=True)
class Target:
    """A bound on the loss between neighbours.

    Attributes:
        name, claim: of the finding.
        mechanism: answers the queries.
        shape: the layout of a vector that encodes an ensemble.
        adjacency: as in `search.neighbour`.
        ratio: true loss / bound, from the two distributions and member 0's charges.
        control: whether the bound is deliberately wrong.
        answers: computes the distributions (B, V) of a mechanism over ensembles.
        charged: whether the bound is member 0's charge; if not, `ratio` is given None for it.
    """

    name: str
    claim: str
    mechanism: Mechanism
    shape: Shape
    adjacency: str
    ratio: Callable[[Array, Array, Array | None], Array]
    control: bool = False
    answers: Callable[[Mechanism, Tensor, Tensor], Array] = distribution
    charged: bool = False

    def objective(self, vectors: Array) -> Array:
        """Return the ratios of the ensembles that the vectors encode; +inf for any NaN."""
        private, public, other = self.shape.ensembles(vectors)
        there = neighbour(private, public, other, self.adjacency)
        charge = None
        if self.charged:
            if isinstance(self.mechanism, AdaPMixED):
                charge = realised(self.mechanism, private, public)[0, :, 0]
            else:
                charge = charged(self.mechanism, private, public)[0]
        with np.errstate(all="ignore"):
            p = self.answers(self.mechanism, private, public)
            q = self.answers(self.mechanism, there, public)
            ratio = self.ratio(p, q, charge)
        bad = np.isnan(ratio) | np.isnan(p).any(-1) | np.isnan(q).any(-1)
        return np.where(bad, math.inf, ratio)


def largest(ratios: list[Array]) -> Array:
    """Return the largest of several ratios, elementwise."""
    found: Array = np.max(np.stack(ratios), axis=0)
    return found
