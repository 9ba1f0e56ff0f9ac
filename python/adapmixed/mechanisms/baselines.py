"""The two ends of the scale: nothing private, and nothing protected."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapmixed.mechanisms.base import Law, Mechanism, Proposal, proposal, public_law
from adapmixed.privacy.events import PublicAnswer, UnprotectedAnswer
from adapmixed_ext import Projection, RandomSource
from adapmixed_ext.ops import prepare


@dataclass(frozen=True)
class PublicOnly(Mechanism):
    """Answers from the public distribution q. Costs nothing."""

    name: ClassVar[str] = "public"

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`; the private logits are checked for their shape alone."""
        shape = tuple(private_logits.shape)
        if len(shape) != 3 or shape[0] < 1 or shape[1:] != tuple(public_logits.shape):
            raise ValueError(
                f"private_logits must have shape (N >= 1, B, V) with (B, V) = "
                f"{tuple(public_logits.shape)}, got {shape}"
            )
        law = public_law(public_logits)
        public = torch.ones(len(public_logits), dtype=torch.bool, device=public_logits.device)
        events = [PublicAnswer(len(public))]
        return proposal(law, public_logits, len(private_logits), public, events, targets, rng)


@dataclass(frozen=True)
class Unprotected(Mechanism):
    """Answers from the plain mean of the private distributions. No guarantee whatever."""

    name: ClassVar[str] = "unprotected"

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`."""
        inputs = prepare(private_logits, public_logits)
        weight = torch.ones_like(inputs.private_lse)
        projection = Projection(weight, torch.zeros_like(weight), *inputs[2:])
        law = Law(inputs.private, inputs.public, projection, public_support=False)
        public = torch.zeros_like(inputs.public_lse, dtype=torch.bool)
        events = [UnprotectedAnswer(len(public))]
        models = inputs.private.shape[0]
        return proposal(law, inputs.public, models, public, events, targets, rng)
