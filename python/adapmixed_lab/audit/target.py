"""A bound under attack: how ensembles are read, and what is divided by what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, Mechanism
from adapmixed_lab.audit.search import Array, Shape, charged, distribution, neighbour, realised

RESOLVED = 1e-13
"""What float64 sums resolve of a divergence."""


@dataclass(frozen=True)
class Target:
    """A bound of what neighbours may differ by.

    Attributes:
        name, claim: of the finding.
        mechanism: answers.
        shape: how a vector is read as an ensemble.
        adjacency: of `search.neighbour`.
        ratio: true loss / bound, of the two distributions and of member 0's charges.
        control: the bound is a wrong one.
        answers: the distributions (B, V) of a mechanism and ensembles.
        charged: the ratio is to what member 0 is charged, which is computed for it; else that is
            None.
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
        """Return the ratios of ensembles that are given by vectors."""
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
        return np.where(np.isnan(ratio), -math.inf, ratio)


def largest(ratios: list[Array]) -> Array:
    """Return the largest of several ratios, elementwise."""
    found: Array = np.max(np.stack(ratios), axis=0)
    return found
