"""Baselines: the public model alone, and two mixtures of the private models without protection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import adapmixed_ext as ops
from adapmixed.limits import MOST_DEPTH, MOST_RANGE, check_number
from adapmixed.mechanisms.mechanism import Mechanism, NextToken, public_token
from adapmixed.mechanisms.rows import Rows
from adapmixed.privacy import PublicAnswer, UnprotectedAnswer
from adapmixed_ext import Projection
from adapmixed_ext.inputs import prepare
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class PublicOnly(Mechanism):
    """Answers from the public distribution, which cost nothing."""

    name: ClassVar[str] = "public"

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        return public_token(rows, (PublicAnswer(len(rows.public)),))


@dataclass(frozen=True)
class Unprotected(Mechanism):
    """Answers from the plain mean of the private distributions, without any guarantee."""

    name: ClassVar[str] = "unprotected"
    no_budget: ClassVar[str] = "it has no bound that could be charged"

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        inputs = prepare(rows.private, rows.public)
        projection = Projection(torch.ones_like(inputs.private_lse), *inputs[2:])
        return NextToken(rows, projection, (UnprotectedAnswer(len(rows.public)),))


@dataclass(frozen=True)
class UnprotectedPool(Mechanism):
    """Answers from a logarithmic pool of the private distributions, without a guarantee.

    p(v) ∝ q(v) exp((κ/N) Σ_i log p_i(v)/q(v)), with log-ratios up to ±min(32, 165/κ). It is a
    reference for what protection costs, often a better one than the mean of `Unprotected`. Choose κ
    on other text than that of the evaluation.

    Attributes:
        scale: κ in (0, 100].
    """

    name: ClassVar[str] = "unprotected-pool"
    no_budget: ClassVar[str] = Unprotected.no_budget

    scale: float = 1.0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0.0, most=100.0)

    def _prepare(self, rows: Rows, rng: RandomSource) -> NextToken:
        widest = min(MOST_RANGE, MOST_DEPTH / self.scale) / 2
        pool = ops.log_pool(
            rows.private, rows.public, lower=-widest, upper=widest, scale=self.scale,
            lse_differences=rows.lse_differences,
        )  # fmt: skip
        return NextToken(rows, pool, (UnprotectedAnswer(len(rows.public)),))
