"""Baselines: the public model alone, and the private models without protection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from adapmixed.mechanisms.distribution import Distribution, public_distribution
from adapmixed.mechanisms.proposal import Mechanism, Prepared
from adapmixed.mechanisms.rows import Rows
from adapmixed.privacy import PublicAnswer, UnprotectedAnswer
from adapmixed_ext import Projection
from adapmixed_ext.inputs import prepare
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class PublicOnly(Mechanism):
    """Answers from the public distribution, which cost nothing."""

    name: ClassVar[str] = "public"

    def _prepare(self, rows: Rows, rng: RandomSource) -> Prepared:
        positions = len(rows.public)
        public = torch.ones(positions, dtype=torch.bool, device=rows.public.device)
        return Prepared(public_distribution(rows), public, (PublicAnswer(positions),))


@dataclass(frozen=True)
class Unprotected(Mechanism):
    """Answers from the plain mean of the private distributions, without any guarantee."""

    name: ClassVar[str] = "unprotected"
    no_budget: ClassVar[str] = "it has no bound that could be charged"

    def _prepare(self, rows: Rows, rng: RandomSource) -> Prepared:
        inputs = prepare(rows.private, rows.public)
        weight = torch.ones_like(inputs.private_lse)
        projection = Projection(weight, torch.zeros_like(weight), *inputs[2:])
        public = torch.zeros_like(inputs.public_lse, dtype=torch.bool)
        events = (UnprotectedAnswer(len(public)),)
        return Prepared(Distribution(rows, projection, public_support=False), public, events)
