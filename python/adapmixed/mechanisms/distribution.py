"""The distribution from which a proposal draws its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms.rows import Rows
from adapmixed_ext.inputs import prepare
from adapmixed_ext.types import RandomSource

# Doubles keep their relative precision down to e^-708.
_LEAST_LOG_PROBABILITY = -700.0


def public_below(least_log_ratio: float) -> float:
    """Return the log q below which tokens of a distribution with p/q >= e^least_log_ratio take q.

    The bound is public. For all other tokens p >= e^-700, so the distribution that is drawn from is
    p but for a few units in the last place; see docs/theory/numerics.md.
    """
    return _LEAST_LOG_PROBABILITY - least_log_ratio


@dataclass(frozen=True)
class Distribution:
    """The mixture or logarithmic pool of projected rows.

    Attributes:
        rows: logits (N, B, k) and (B, k).
        projection: projection of these rows.
        public_support: False if tokens may be drawn that q lacks.
        public_below: log q below which a token has its public probability.
        takes_part: (N, B) bool. False for rows that answer q whichever members contribute; None if
            all take part.
    """

    rows: Rows
    projection: ops.Projection | ops.Clipping | ops.LogPool
    public_support: bool = True
    public_below: float = -torch.inf
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
            keep=self.rows.drawn,
        )  # fmt: skip
        return replace(self, projection=restricted)

    def sample(self, rng: RandomSource) -> Tensor:
        """Draw one token per position; return (B,) int64."""
        probabilities = self.probabilities()
        support = self.rows.public
        if not self.public_support:
            support = torch.where(probabilities > 0.0, 0.0, -torch.inf).to(support.dtype)
        return self.rows.released(ops.sample(probabilities, support, rng=rng))

    def probabilities(self) -> Tensor:
        """Return the probabilities, (B, k) float64. They are private."""
        rows = self.rows
        mixture = ops.mixture(rows.private, rows.public, self.projection)
        if self.public_below > -torch.inf:
            rare = self._answered_from_q(rows.public)
            if bool(rare.any()):
                log_q = rows.public.double() - self.projection.public_lse.unsqueeze(-1)
                mixture[rare] = log_q[rare].exp()
        return mixture

    def _answered_from_q(self, public_logits: Tensor) -> Tensor:
        """Return (B, k) bool, True for tokens so rare that they have their public probability."""
        return public_logits < (self.public_below + self.projection.public_lse).unsqueeze(-1)

    def likeliest(self) -> Tensor:
        """Return the tokens of largest probability, (B,) int64, for evaluation only."""
        return self.rows.released(self.probabilities().argmax(-1))

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return log p(target), (B,) float64, without forming (B, k).

        It is −inf for a target that top-k has removed.
        """
        rows = self.rows
        places, found = rows.places(targets)
        values = ops.log_prob(rows.private, rows.public, self.projection, places)
        at_target = rows.public.gather(1, places.unsqueeze(1))
        log_q = at_target.squeeze(1).double() - self.projection.public_lse
        values = torch.where(self._answered_from_q(at_target).squeeze(1), log_q, values)
        return torch.where(found, values, -torch.inf)


def public_distribution(rows: Rows) -> Distribution:
    """Return q itself, as the mixture of one member of weight 0, without any private value."""
    alone = replace(rows, private=rows.public[None])
    inputs = prepare(alone.private, alone.public)
    weight = torch.zeros_like(inputs.private_lse)
    return Distribution(alone, ops.Projection(weight, weight + 1.0, *inputs[2:]))
