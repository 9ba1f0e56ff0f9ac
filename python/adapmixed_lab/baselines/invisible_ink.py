"""InvisibleInk's rule: the mean of clipped differences of raw logits to the public logits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from adapmixed.limits import check_number, check_optional_queries, check_scale
from adapmixed.mechanisms import Rows
from adapmixed.privacy import BoundedRangeAnswer
from adapmixed_ext.types import RandomSource
from adapmixed_lab.baselines.given import Baseline, GivenToken, answered, unprotected


@dataclass(frozen=True)
class InvisibleInk(Baseline):
    """Clipped differences of logits, averaged, then a softmax at a temperature: a fixed (ε, δ).

    With raw logits z_i of the N members and z_0 of the public model, the token is drawn from
    softmax((z_0 + (1/N) Σ_i clip(z_i − z_0, −C, C))/τ) (Vinod, Pillutla and Thakurta 2025,
    arXiv 2507.02974, DClip). `top_k` of the rows takes the place of their expanded top-k set, which
    is public, too.

    **Guarantee.** Emptying member i makes its difference 0, so log p changes by u_i/(Nτ) and a
    constant, |u_i| ≤ C. The range of the change is at most η = 2C/(Nτ). For replace-one it is at
    most 2η. This is the `BoundedRangeAnswer` of scale 1/τ and clips ±C. The paper and its package
    charge one token ρ = (C/(Nτ))²/2 of zCDP, which is η²/8. The accountant composes the ranges,
    which gives no larger ε than T times that.

    **Rounding.** Each difference is rounded to a grid that follows from N and C, and clipped to
    grid points within ±C. So their sums are exact, as in the operator `log_pool`. The rounding of
    what follows is below the bound of that operator, which the event counts twice.

    Attributes:
        clip: C in [0, 32], in units of a logit.
        temperature: τ in [0.25, 100]. Below that, rare tokens would leave the range of float64.
        queries: T in [1, 2^40] that the guarantee is planned for; None charges each as it comes.
    """

    name: ClassVar[str] = "invisible-ink"

    clip: float
    temperature: float = 1.0
    queries: int | None = None

    def __post_init__(self) -> None:
        check_number("clip", self.clip, least=0.0, most=32.0)
        check_number("temperature", self.temperature, least=0.25, most=100.0)
        check_scale(1 / self.temperature, -self.clip, self.clip)
        check_optional_queries(self.queries)

    def _prepare(self, rows: Rows, rng: RandomSource) -> GivenToken:
        models, positions = rows.private.shape[:2]
        inputs, projection = unprotected(rows)
        masked, public = rows.public.isneginf(), rows.public.double()
        exponent = math.frexp(models * self.clip)[1]  # a sum is below 2^exponent
        unit = 2.0 ** -min(40, 51 - exponent)
        most = math.floor(self.clip / unit)
        total = torch.zeros_like(public)  # in units, below 2^51
        for row in rows.private:
            difference = (row.double() - public).masked_fill(masked, 0.0)
            total += (difference / unit).round().clamp(-most, most)
        scale = 1 / self.temperature
        logs = (public - inputs.public_lse[:, None]) * scale + scale / models * unit * total
        event = BoundedRangeAnswer(scale, -self.clip, self.clip, models, positions, self.queries)
        return answered(rows, projection, logs.softmax(-1), (event,))
