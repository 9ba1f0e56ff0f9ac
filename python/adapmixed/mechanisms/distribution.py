"""The distribution from which a proposal draws its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms.rows import Rows
from adapmixed_ext.inputs import prepare
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class Distribution:
    """The mixture or logarithmic pool of projected rows.

    Attributes:
        rows: logits (N, B, k) and (B, k).
        projection: projection of these rows.
        takes_part: (N, B) bool. False for rows that answer q whichever members contribute; None if
            all take part.
    """

    rows: Rows
    projection: ops.Projection | ops.Clipping | ops.LogPool
    takes_part: Tensor | None = None

    def __post_init__(self) -> None:
        # Operators that only queue work have not reported bad rows yet.
        self.projection.check()

    def of_members(self, active: Tensor) -> Distribution:
        """Return the distribution in which only these members contribute and the others answer q.

        Args:
            active: (N, B) bool, True for members that contribute.
        """
        chosen = active if self.takes_part is None else active & self.takes_part
        if isinstance(self.projection, ops.Clipping):
            return replace(self, projection=replace(self.projection, active=chosen))
        assert isinstance(self.projection, ops.LogPool)  # others have no individual charges
        pool = self.projection
        known = bool(chosen.all()) if pool.active is None else torch.equal(chosen, pool.active)
        if known:
            return self
        restricted = ops.log_pool(
            self.rows.private, self.rows.public, lower=pool.lower, upper=pool.upper,
            scale=pool.scale, num_models=pool.num_models, active=chosen,
            lse_differences=self.rows.lse_differences,
        )  # fmt: skip
        return replace(self, projection=restricted)

    def sample(self, rng: RandomSource) -> Tensor:
        """Draw one token per position; return (B,) int64."""
        drawn = ops.sample(self.probabilities(), self.rows.public, rng=rng)
        return self.rows.released(drawn, rng)

    def probabilities(self) -> Tensor:
        """Return the probabilities of the columns, (B, k) float64. They are private."""
        return ops.mixture(self.rows.private, self.rows.public, self.projection)

    def likeliest(self) -> Tensor:
        """Return the active tokens of largest probability, (B,) int64, for evaluation only."""
        return self.rows.named(self.probabilities()[:, : self.rows.width].argmax(-1))

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return log p(target), (B,) float64, without forming (B, k).

        It is −inf for a target that top-k has removed.
        """
        rows = self.rows
        places, share = rows.places(targets)
        return ops.log_prob(rows.private, rows.public, self.projection, places) + share


def public_distribution(rows: Rows) -> Distribution:
    """Return q itself, as the mixture of one member of weight 0, without any private value."""
    alone = replace(rows, private=rows.public[None])
    inputs = prepare(alone.private, alone.public)
    weight = torch.zeros_like(inputs.private_lse)
    return Distribution(alone, ops.Projection(weight, *inputs[2:]))
