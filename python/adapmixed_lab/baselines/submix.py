"""SubMix as its authors published it in code. Its charge is wrong, so no guarantee follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapmixed.limits import check_epsilon, check_number, check_queries
from adapmixed.mechanisms import Rows
from adapmixed.privacy import UnprotectedAnswer
from adapmixed_ext.types import RandomSource
from adapmixed_lab.baselines.given import Baseline, GivenToken, answered, unprotected

REACH, STEP, STEPS = 5.0, 0.93, 512
"""γ/2, the factor of the search for λ, and the number of its steps, after which λ counts as 0."""


@dataclass(frozen=True)
class SubMix(Baseline):
    """The mean of pairs of members that are mixed with the public model: as published, not sound.

    Ginart et al. 2022, program at commit 6540f5d. Members 0 and 1 are a pair, as are 2 and 3 and so
    on; the program pairs them at random, and both leave out an odd last one. Rows are clipped to
    within e^±5 of q and scaled to the sum 1, until they are so close. Rows p, p' of a pair become
    λ (p + p')/2 + (1 − λ) q. Here λ is the largest power of 0.93 such that the divergences of order
    α of that from λ p + (1 − λ) q and from λ p' + (1 − λ) q are at most ε/T. The answer is drawn
    from the mean over the pairs.

    **No guarantee.** What the program charges a pair can be far below the pair's loss, and it
    compares the budget with earlier charges alone (item 12 of docs/theory/errata.md). So the
    accountant counts these answers as unprotected. They go on after the budget is spent, at which
    the program takes the public model.

    Attributes:
        epsilon: ε that the program would claim, > 0.
        queries: T in [1, 2^40].
        order: α > 1, finite; 2 in the program's example.
    """

    name: ClassVar[str] = "submix"

    epsilon: float
    queries: int
    order: float = 2.0

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_queries(self.queries)
        check_number("order", self.order, above=1.0)

    @property
    def planned_queries(self) -> None:
        """None: no guarantee is planned."""

    def mixes(self, private: Tensor, q: Tensor) -> Tensor:
        """Return the mixed distributions of all pairs, (P, B, k) float64.

        Args:
            private: (N, B, k) logits, N ≥ 2.
            q: (B, k) float64, the public distribution.
        """
        if len(private) < 2:
            raise ValueError(f"num_models must be at least 2 for SubMix, got {len(private)}")
        pairs = []
        for i in range(0, len(private) - 1, 2):
            p, other = (_near(row.double().softmax(-1), q) for row in private[i : i + 2])
            pairs.append(self._mixed(p, other, q))
        return torch.stack(pairs)

    def _mixed(self, p: Tensor, other: Tensor, q: Tensor) -> Tensor:
        """Find λ by bisection of its power, since the divergences grow with λ."""
        middle, target = (p + other) / 2, self.epsilon / self.queries
        low = torch.zeros_like(q[:, :1])  # a power that is too small, or 0.93^0
        high = torch.full_like(low, float(STEPS))
        while bool((high - low > 1).any()):
            power = ((low + high) / 2).floor()
            whole, *rows = (q + STEP**power * (one - q) for one in (middle, p, other))
            cost = torch.maximum(*(divergence(whole, row, self.order) for row in rows))
            fits = cost[:, None] <= target
            low, high = torch.where(fits, low, power), torch.where(fits, power, high)
        return q + torch.where(high < STEPS, STEP**high, 0.0) * (middle - q)

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
        inputs, projection = unprotected(rows)
        q = (rows.public.double() - inputs.public_lse[:, None]).exp()
        mean = self.mixes(rows.private, q).mean(0)
        return answered(rows, projection, mean, (UnprotectedAnswer(len(q)),))


def divergence(p: Tensor, q: Tensor, order: float) -> Tensor:
    """Return D_order(p ‖ q) over the last axis; 0/0 counts 0."""
    terms = (p**order * q ** (1 - order)).nan_to_num(0.0, posinf=torch.inf)
    return terms.sum(-1).log() / (order - 1)


def _near(p: Tensor, q: Tensor) -> Tensor:
    """Return rows within e^±5 of q, by clipping and scaling until they are."""
    least, most = (q * torch.tensor(end).double().exp() for end in (-REACH, REACH))
    while bool(((p / q).log().abs() > REACH + 1e-4).any()):
        p = p.clamp(least, most)
        p = p / p.sum(-1, keepdim=True)
    return p
