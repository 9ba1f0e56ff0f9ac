"""Mechanisms under the decoding loop, and one that logs what it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapmixed.mechanisms import AdaPMixED, Mechanism, PMixED, Proposal, PublicOnly, Unprotected
from adapmixed.ranks import ALONE

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 3, 3]])
SCREENED: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.05, threshold=0.3, top_k=4
)
MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "adapmixed": AdaPMixED(**SCREENED),
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
}


@dataclass(frozen=True)
class Spy(Mechanism):
    """Answers as another mechanism does and logs every phase."""

    inner: Mechanism
    log: list[tuple[str, Any]] = field(default_factory=list)
    forced: tuple[tuple[int, ...], ...] = ()  # tokens to release instead, step by step

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: Any,
        ranks: Any = ALONE,
    ) -> Any:
        proposal = self.inner.propose(private_logits, public_logits, targets=targets, rng=rng)
        self.log.append(("propose", (private_logits.clone(), public_logits.clone())))
        return SpyProposal(proposal, self)


@dataclass(frozen=True)
class SpyProposal:
    inner: Proposal
    spy: Spy
    ranks: Any = ALONE

    def events(self, active: Tensor | None = None) -> Any:
        self.spy.log.append(("events", None))
        return self.inner.events(active)

    def release(self, active: Tensor | None = None) -> Any:
        answer = self.inner.release(active)
        step = sum(phase == "release" for phase, _ in self.spy.log)
        if step < len(self.spy.forced):
            forced = torch.tensor(self.spy.forced[step])
            assert forced.shape == answer.tokens.shape
            answer = type(answer)(forced, None, answer.public)
        self.spy.log.append(("release", answer.tokens))
        return answer
