"""The two phases of every mechanism: propose (events, no token), then release (the token).

    proposal = mechanism.propose(private_logits, public_logits, rng=rng)
    accountant.add(proposal.events())          # charged before anything is released
    answer = proposal.release()

With a filter, both take the slots that may contribute: `events(active)`, then `release(active)`.

N models, B positions, V tokens, K orders, as in ``adapmixed_ext``.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from adapmixed.mechanisms.law import Law, SplitLaw
from adapmixed.privacy.events import Caveat, Event
from adapmixed.ranks import ALONE, Ranks
from adapmixed_ext import RandomSource


@dataclass(frozen=True)
class Answer:
    """What a proposal releases.

    Attributes:
        tokens: (B,) int64, or None when targets were given.
        log_prob: (B,) float64, log p(target), or None without targets. Evaluation only: it reveals
            a probability of the mixture.
        public: (B,) bool, answered from the public distribution alone.
    """

    tokens: Tensor | None
    log_prob: Tensor | None
    public: Tensor


@dataclass(frozen=True)
class Retirement:
    """How an answer and its events follow from the slots that a filter lets contribute."""

    law: Callable[[Tensor], Law]
    events: Callable[[Tensor], Sequence[Event]]


@dataclass(frozen=True)
class Proposal:
    """An answer that waits to be charged.

    It has one set of contributing slots, which the first `events(active)` or `release` fixes. Later
    calls must name the same set, so the charge is always that of the released answer.

    Attributes:
        charges: (N, B, K) float64, what each model would be charged; None where the charge does
            not depend on the model.
        num_models: N, of all ranks.
        ranks: that release this answer together; the one that leads is charged.
    """

    law: Law | SplitLaw
    public: Tensor
    charges: Tensor | None
    num_models: int
    _events: tuple[Event, ...]
    _targets: Tensor | None
    _rng: RandomSource
    _retirement: Retirement | None = None
    ranks: Ranks = ALONE
    _answers: list[Answer] = field(default_factory=list, repr=False, compare=False)
    # The fixed set of slots, in a list so that copies share it: a mask, or None for all of them.
    _slots: list[Tensor | None] = field(default_factory=list, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def individual_charges(self) -> Tensor | None:
        """(N, B) float64, what a filter charges each slot: `charges` where each is bounded by row i
        and public values alone, so that slots can be retired one by one; else None.
        """
        if self._retirement is None or self.charges is None:
            return None
        return self.charges[..., 0]

    def events(self, active: Tensor | None = None) -> list[Event]:
        """Return the privacy events of this answer, to be charged before :meth:`release`.

        A `Caveat` is among them if the source of randomness is seeded or does not say.

        Args:
            active: (N, B) bool, the slots that a filter lets contribute, each charged on its own.
                None means no filter: the whole answer has the charge that was fixed beforehand.

        Raises:
            ValueError: if the answer has other slots: `events(active)` was called with another
                mask, or `release()` answered from all slots and `active` leaves one out; or if a
                slot is to be retired and the charges are those of the whole ensemble.
        """
        self._check_active(active)
        seeded = [Caveat("seeded")] if getattr(self._rng, "seeded", True) else []
        if self._retirement is None:
            return [*self._events, *seeded]
        active = None if active is None else active.clone()  # the caller may change the mask later
        with self._lock:
            if active is not None and not self._slots:
                self._slots.append(active)
            self._check_slots(active)
        if active is None:
            return [*self._events, *seeded]
        return [*self._retirement.events(active), *seeded]

    def release(self, active: Tensor | None = None) -> Answer:
        """Draw the tokens, or return log p(target) if targets were proposed.

        One charge pays for one answer: every further call returns the same answer.

        Args:
            active: the mask that `events(active)` has charged. None means no filter.

        Raises:
            ValueError: if `active` is not the mask that `events(active)` has charged, or is missing
                after `events(active)`.
        """
        self._check_active(active)
        active = None if active is None else active.clone()
        with self._lock:
            if self._retirement is not None:
                self._check_charged(active)
                if not self._slots:
                    self._slots.append(None)
                self._check_slots(active)
            if not self._answers:
                law = self.law
                if active is not None and self._retirement is not None:
                    law = self._retirement.law(active)
                if self._targets is not None:
                    answer = Answer(None, law.log_prob(self._targets), self.public)
                else:
                    answer = Answer(law.sample(self._rng), None, self.public)
                self._answers.append(answer)
            return self._answers[0]

    def _check_charged(self, active: Tensor | None) -> None:
        """Raise unless `events` was asked as `release` is: with a mask, or without."""
        if active is None and self._slots and self._slots[0] is not None:
            raise ValueError("active must be the slots that events(active) has charged, got None")
        if active is not None and not self._slots:
            raise ValueError(
                "active must be the slots that events(active) has charged, got a mask before "
                "events(active) was called"
            )

    def _check_slots(self, active: Tensor | None) -> None:
        """Raise if the answer has other slots than `active`; None means all of them."""
        if not self._slots:
            return
        fixed = self._slots[0]
        if fixed is None:
            if active is not None and not bool(active.all()):
                raise ValueError(
                    "active must be all True after release(), which answered from all slots, got a "
                    "mask that leaves one out: call events(active) before release(active)"
                )
        elif not (bool(fixed.all()) if active is None else torch.equal(active, fixed)):
            raise ValueError(
                "active must be the slots that the first events(active) has charged, got another "
                "set of slots"
            )

    def _check_active(self, active: Tensor | None) -> None:
        if active is None:
            return
        shape = (self.num_models, len(self.public))
        if active.dtype != torch.bool or tuple(active.shape) != shape:
            raise ValueError(
                f"active must be bool of shape (N, B) = {shape}, got {active.dtype} "
                f"{tuple(active.shape)}"
            )
        if self._retirement is None and not bool(active.all()):
            raise ValueError(
                "active must be all True: this mechanism's charges are those of the whole "
                "ensemble, so no slot can be retired"
            )


class Mechanism(ABC):
    """A frozen configuration that turns logits into answers and privacy events."""

    name: ClassVar[str]

    @property
    def budget(self) -> int | None:
        """How many queries the mechanism is planned for; None: any number."""
        return None

    def held_bytes(self, rows: int, vocab_size: int, element: int) -> int:
        """Bytes that the answer to one query holds at most beside its logits.

        Here the answer's law and what is drawn from it, three times V float64.

        Args:
            rows: N + 1, of this rank.
            vocab_size: V.
            element: bytes of a logit.
        """
        return 3 * 8 * vocab_size

    @abstractmethod
    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
        ranks: Ranks = ALONE,
    ) -> Proposal:
        """Prepares the answers of B queries without releasing anything.

        Args:
            private_logits: (N, B, V), raw logits; those of this rank's members.
            public_logits: (B, V), the same bits on every rank.
            targets: (B,) int64 for evaluation: the answer is log p(target) and no token is drawn.
            rng: source of all randomness (``adapmixed.rng``); only the rank that leads draws.
            ranks: among which the members are spread; all of them propose together.

        Raises:
            ValueError: as the operators, for bad logits or targets.
        """


def proposal(
    law: Law | SplitLaw,
    public_logits: Tensor,
    num_models: int,
    public: Tensor,
    events: Sequence[Event],
    targets: Tensor | None,
    rng: RandomSource,
    charges: Tensor | None = None,
    retirement: Retirement | None = None,
    *,
    ranks: Ranks = ALONE,
) -> Proposal:
    """A :class:`Proposal`; targets are checked here, before anything is charged."""
    if targets is not None:
        positions, vocab = public_logits.shape
        if not isinstance(targets, Tensor):
            raise ValueError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
        if targets.dtype != torch.int64 or tuple(targets.shape) != (positions,):
            raise ValueError(
                f"targets must be torch.int64 of shape ({positions},), got {targets.dtype} "
                f"{tuple(targets.shape)}"
            )
        outside = ((targets < 0) | (targets >= vocab)).nonzero()
        if outside.numel():
            at = int(outside[0])
            raise ValueError(
                f"targets[{at}] must be a token in [0, {vocab}), got {int(targets[at])}"
            )
    return Proposal(
        law, public, charges, num_models, tuple(events), targets, rng, retirement, ranks
    )
