"""The two ends of the scale: nothing private, and nothing protected."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adapmixed.mechanisms.base import Mechanism, Proposal, proposal
from adapmixed.mechanisms.law import Law, public_law
from adapmixed.privacy.events import PublicAnswer, UnprotectedAnswer
from adapmixed.ranks import ALONE, Ranks
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
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`; the private logits are checked for their shape alone."""
        shape = tuple(private_logits.shape)
        if len(shape) != 3 or shape[0] < 1 or shape[1:] != tuple(public_logits.shape):
            raise ValueError(
                f"private_logits must have shape (N >= 1, B, V) with (B, V) = "
                f"{tuple(public_logits.shape)}, got {shape}"
            )
        law = public_law(public_logits, ranks)
        public = torch.ones(len(public_logits), dtype=torch.bool, device=public_logits.device)
        events = [PublicAnswer(len(public))]
        models = ranks.slots(len(private_logits))
        return proposal(law, public_logits, models, public, events, targets, rng, ranks=ranks)


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
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """See :meth:`Mechanism.propose`."""
        inputs = prepare(private_logits, public_logits)
        weight = torch.ones_like(inputs.private_lse)
        projection = Projection(weight, torch.zeros_like(weight), *inputs[2:])
        models = ranks.slots(inputs.private.shape[0])
        law = Law(
            inputs.private,
            inputs.public,
            projection,
            public_support=False,
            ranks=ranks,
            slots=None if ranks.alone else models,
        )
        public = torch.zeros_like(inputs.public_lse, dtype=torch.bool)
        events = [UnprotectedAnswer(len(public))]
        return proposal(law, inputs.public, models, public, events, targets, rng, ranks=ranks)
