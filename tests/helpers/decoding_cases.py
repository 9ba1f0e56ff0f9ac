"""Run mechanisms in the decoding loop, and log the calls to one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adapmixed.generation import PrivateGenerator
from adapmixed.mechanisms import (
    AdaPMixED,
    Answer,
    Mechanism,
    Origin,
    PMixED,
    PublicOnly,
    Rows,
    Ticket,
    Unprotected,
)
from adapmixed.privacy import Accountant
from adapmixed.rng import SeededRandom

PROMPT = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 3, 3]])
SCREENED: dict[str, Any] = dict(
    order=3.0, target_leakage=0.05, screen_weight=0.5, sigma=0.05, threshold=0.3, screen_top_k=4
)
MECHANISMS: dict[str, Mechanism] = {
    "public": PublicOnly(),
    "unprotected": Unprotected(),
    "adapmixed": AdaPMixED(**SCREENED),
    "pmixed": PMixED(8.0, 1e-5, 1000, 6.0),
}


def steps(
    ensemble: Any,
    mechanism: Mechanism,
    prompt: Tensor = PROMPT,
    *,
    max_new_tokens: int = 4,
    accountant: Accountant | None = None,
    rng: Any = None,
    memory_bytes: int = 1 << 30,
    **settings: Any,
) -> Iterator[Tensor]:
    """Yield the answers to token ids step by step.

    The default source of randomness is seeded, and the default accountant is a new one.
    """
    accountant = Accountant(1e-5) if accountant is None else accountant
    rng = SeededRandom(0) if rng is None else rng
    if getattr(ensemble, "tokenizer", "") is None:
        ensemble.tokenizer = "unused"
    generator = PrivateGenerator(
        ensemble, mechanism, accountant, rng=rng, memory_bytes=memory_bytes
    )
    return generator.stream_tokens(prompt, max_new_tokens=max_new_tokens, **settings)


def answered(
    ensemble: Any, mechanism: Mechanism, prompt: Tensor = PROMPT, **settings: Any
) -> Tensor:
    """Return the tokens of all steps, (b, s) int64, with −1 after an end."""
    return torch.stack(list(steps(ensemble, mechanism, prompt, **settings)), dim=1)


@dataclass(frozen=True)
class Spy(Mechanism):
    """A mechanism that answers as another one does and logs every phase."""

    inner: Mechanism
    log: list[tuple[str, Any]] = field(default_factory=list, repr=False, compare=False)
    forced: tuple[tuple[int, ...], ...] = ()  # tokens to release instead, step by step

    no_budget = property(lambda self: self.inner.no_budget)  # type: ignore[assignment]
    no_total = property(lambda self: self.inner.no_total)  # type: ignore[assignment]
    no_replacement = property(lambda self: self.inner.no_replacement)  # type: ignore[assignment]
    planned_queries = property(lambda self: self.inner.planned_queries)  # type: ignore[assignment]
    measure = property(lambda self: self.inner.measure)  # type: ignore[assignment]

    def largest_charge(self, num_models: int) -> float | None:
        return self.inner.largest_charge(num_models)

    @property
    def phases(self) -> list[str]:
        return [phase for phase, _ in self.log]

    @property
    def asked(self) -> list[tuple[Tensor, Tensor]]:
        """The (private, public) logits of every step."""
        return [logits for phase, logits in self.log if phase == "propose"]

    def propose_rows(
        self, rows: Rows, *, rng: Any, targets: Tensor | None = None, origin: Any = None
    ) -> Any:
        origin = Origin() if origin is None else origin
        proposal = self.inner.propose_rows(rows, rng=rng, targets=targets, origin=origin)
        self.log.append(("propose", (rows.private.clone(), rows.public.clone())))
        return SpyTicket(proposal, self)

    def _prepare(self, rows: Rows, rng: Any) -> Any:
        raise AssertionError("the inner mechanism prepares")


@dataclass(frozen=True)
class SpyTicket:
    inner: Ticket
    mechanism: Spy

    @property
    def num_models(self) -> int:
        return self.inner.num_models

    @property
    def origin(self) -> Origin:
        return self.inner.origin

    def charge(self, pay: Any) -> None:
        def watched(events: Any, charges: Any) -> Any:
            log, at = self.mechanism.log, len(self.mechanism.log)
            log.append(("events", None))
            active = pay(events, charges)
            log[at] = "events", active
            return active

        try:
            self.inner.charge(watched)
        except BaseException:
            self.mechanism.log.append(("fail", None))
            raise

    def release(self) -> Answer:
        answer = self.inner.release()
        step = self.mechanism.phases.count("release")
        if step < len(self.mechanism.forced):
            forced = torch.tensor(self.mechanism.forced[step])
            assert answer.tokens is not None and forced.shape == answer.tokens.shape
            answer = Answer(forced, None, answer.public)
        self.mechanism.log.append(("release", answer.tokens))
        return answer
