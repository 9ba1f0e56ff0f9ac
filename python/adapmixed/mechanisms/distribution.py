"""The distribution that a proposal releases a draw of."""

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
    """Return log q below which a distribution with p/q >= e^least_log_ratio answers q: public.

    Elsewhere p >= e^-700, so that what is drawn is p but for a few units in the last place
    (docs/privacy.md, section 8).
    """
    return _LEAST_LOG_PROBABILITY - least_log_ratio


@dataclass(frozen=True)
class Distribution:
    """The mixture, or pool, of projected rows.

    Attributes:
        rows: (N, B, k) and (B, k).
        projection: of these rows.
        public_support: False if tokens that q lacks may be drawn, too.
        public_below: tokens with a lower log q are answered from q.
        takes_part: (N, B) bool, the rows that are not q whatever is decided; None: all.
    """

    rows: Rows
    projection: ops.Projection | ops.Clipping | ops.LogPool
    public_support: bool = True
    public_below: float = -torch.inf
    takes_part: Tensor | None = None

    def __post_init__(self) -> None:
        # Operators that only queue work have not said yet that a row was bad.
        self.projection.check()

    def of_members(self, active: Tensor) -> Distribution:
        """Return the distribution in which only these members contribute; the others answer q.

        Args:
            active: (N, B) bool.
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
        )  # fmt: skip
        return replace(self, projection=restricted)

    def sample(self, rng: RandomSource) -> Tensor:
        """Draw one token per position, (B,) int64."""
        probabilities = self.probabilities()
        support = self.rows.public
        if not self.public_support:
            support = torch.where(probabilities > 0.0, 0.0, -torch.inf).to(support.dtype)
        return self.rows.released(ops.sample(probabilities, support, rng=rng))

    def probabilities(self) -> Tensor:
        """Return (B, k) float64: private."""
        rows = self.rows
        mixture = ops.mixture(rows.private, rows.public, self.projection)
        if self.public_below > -torch.inf:
            rare = self._answered_from_q(rows.public)
            if bool(rare.any()):
                log_q = rows.public.double() - self.projection.public_lse.unsqueeze(-1)
                mixture[rare] = log_q[rare].exp()
        return mixture

    def _answered_from_q(self, public_logits: Tensor) -> Tensor:
        """Return which of (B, k) logits are of tokens that are so rare in q."""
        return public_logits < (self.public_below + self.projection.public_lse).unsqueeze(-1)

    def likeliest(self) -> Tensor:
        """Return the token of largest probability, (B,) int64: for evaluation alone."""
        return self.rows.released(self.probabilities().argmax(-1))

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return (B,) float64, −inf for a target that is not kept, without forming (B, k)."""
        rows = self.rows
        places, found = rows.places(targets)
        values = ops.log_prob(rows.private, rows.public, self.projection, places)
        at_target = rows.public.gather(1, places.unsqueeze(1))
        log_q = at_target.squeeze(1).double() - self.projection.public_lse
        values = torch.where(self._answered_from_q(at_target).squeeze(1), log_q, values)
        return torch.where(found, values, -torch.inf)


def public_distribution(rows: Rows) -> Distribution:
    """Return q itself: the mixture of one member of weight 0, so that no private value is read."""
    alone = replace(rows, private=rows.public[None])
    inputs = prepare(alone.private, alone.public)
    weight = torch.zeros_like(inputs.private_lse)
    return Distribution(alone, ops.Projection(weight, weight + 1.0, *inputs[2:]))
