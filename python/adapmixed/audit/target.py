"""A bound under attack: how ensembles are read, which laws they give, what is divided by what."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from adapmixed.audit.search import Array, Shape, law, neighbour
from adapmixed.mechanisms import Mechanism
from adapmixed.rng import SeededRandom

RESOLVED = 1e-13  # what float64 sums resolve of a divergence


@dataclass(frozen=True)
class Target:
    """`ratio` gives true loss / bound of the two laws and of member 0's charges.

    `answers` gives the laws (B, V) of a mechanism and ensembles. `charged`: the ratio is to what
    member 0 is charged, which is computed for it; else that is None.
    """

    name: str
    claim: str
    mechanism: Mechanism
    shape: Shape
    adjacency: str
    ratio: Callable[[Array, Array, Array | None], Array]
    control: bool = False
    answers: Callable[[Mechanism, Tensor, Tensor], Array] = law
    charged: bool = False

    def objective(self, vectors: Array) -> Array:
        """The ratios of ensembles that are given by vectors."""
        private, public, other = self.shape.ensembles(vectors)
        there = neighbour(private, public, other, self.adjacency)
        charge = None
        if self.charged:
            charges = self.mechanism.propose(private, public, rng=SeededRandom(0)).charges
            assert charges is not None
            charge = np.asarray(charges[0, :, 0].numpy(), dtype=np.float64)
        with np.errstate(all="ignore"):
            p = self.answers(self.mechanism, private, public)
            q = self.answers(self.mechanism, there, public)
            ratio = self.ratio(p, q, charge)
        return np.where(np.isnan(ratio), -math.inf, ratio)


def largest(ratios: list[Array]) -> Array:
    """The largest of several ratios, elementwise."""
    found: Array = np.max(np.stack(ratios), axis=0)
    return found
