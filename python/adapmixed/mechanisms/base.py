"""The two phases of every mechanism: propose (events, no token), then release (the token).

    proposal = mechanism.propose(private_logits, public_logits, rng=rng)
    accountant.add(proposal.events())          # charged before anything is released
    answer = proposal.release()

N models, B positions, V tokens, K orders, as in ``adapmixed_ext``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.mechanisms.public_rules import Restricted
from adapmixed.privacy.events import Caveat, Event
from adapmixed_ext import RandomSource
from adapmixed_ext.ops import prepare


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
class Law:
    """The distribution an answer is drawn from: the mixture, or pool, of projected rows."""

    private_logits: Tensor
    public_logits: Tensor
    projection: ops.Projection | ops.Clipping | ops.LogPool
    public_support: bool = True  # else tokens that q lacks may be drawn too
    kept: Restricted | None = None  # where these logits are of some tokens alone: which

    def __post_init__(self) -> None:
        # Where operators only queue work, nothing has said yet that a row was bad.
        self.projection.check()
        # What was charged is the law of these values: a later change in place would be another law.
        for name in ("private_logits", "public_logits"):
            logits: Tensor = getattr(self, name)
            if logits.is_inference():  # carries no counter of changes: keep a copy of our own
                object.__setattr__(self, name, logits.clone())
        object.__setattr__(self, "_versions", self._current_versions())

    def _current_versions(self) -> tuple[int, ...]:
        logits = (self.private_logits, self.public_logits)
        return tuple(0 if t.is_inference() else t._version for t in logits)

    def _check_unchanged(self) -> None:
        if self._current_versions() != self._versions:  # type: ignore[attr-defined]
            raise ValueError(
                "private_logits and public_logits must not be changed between propose and release: "
                "the charged law is that of the proposed values"
            )

    def sample(self, rng: RandomSource) -> Tensor:
        """One token per position, (B,) int64."""
        self._check_unchanged()
        probabilities = ops.mixture(self.private_logits, self.public_logits, self.projection)
        support = self.public_logits
        if not self.public_support:
            support = torch.where(probabilities > 0.0, 0.0, -torch.inf).to(support.dtype)
        tokens = ops.sample(probabilities, support, rng=rng)
        return tokens if self.kept is None else self.kept.released(tokens)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B,) float64, −inf for a target that is not kept; the whole (B, V) is never formed."""
        self._check_unchanged()
        found = None
        if self.kept is not None:
            targets, found = self.kept.places(targets)
        values = ops.log_prob(self.private_logits, self.public_logits, self.projection, targets)
        return values if found is None else torch.where(found, values, -torch.inf)


@dataclass(frozen=True)
class SplitLaw:
    """One law per position, where positions differ in their members."""

    laws: tuple[Law, ...]

    def sample(self, rng: RandomSource) -> Tensor:
        """One token per position, (B,) int64."""
        tokens = [law.sample(rng) for law in self.laws]
        return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int64)

    def log_prob(self, targets: Tensor) -> Tensor:
        """(B,) float64."""
        parts = [law.log_prob(targets[b : b + 1]) for b, law in enumerate(self.laws)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def public_law(public_logits: Tensor) -> Law:
    """q itself: the mixture of one slot of weight 0, so that no private value is read for it."""
    inputs = prepare(public_logits[None], public_logits)
    weight = torch.zeros_like(inputs.private_lse)
    return Law(inputs.private, inputs.public, ops.Projection(weight, weight + 1.0, *inputs[2:]))


@dataclass(frozen=True)
class Retirement:
    """How an answer and its events follow from the slots that a filter lets contribute."""

    law: Callable[[Tensor], Law]
    events: Callable[[Tensor], Sequence[Event]]


@dataclass(frozen=True)
class Proposal:
    """An answer that waits to be charged.

    Attributes:
        charges: (N, B, K) float64, what each model would be charged; None where the charge does
            not depend on the model.
    """

    law: Law | SplitLaw
    public: Tensor
    charges: Tensor | None
    num_models: int
    _events: tuple[Event, ...]
    _targets: Tensor | None
    _rng: RandomSource
    _retirement: Retirement | None = None
    _answers: list[Answer] = field(default_factory=list, repr=False, compare=False)
    _charged: list[Tensor] = field(default_factory=list, repr=False, compare=False)

    @property
    def individual_charges(self) -> Tensor | None:
        """(N, B) float64, what a filter charges each slot: `charges` where each is bounded by row i
        and public values alone, so that slots can be retired one by one; else None."""
        if self._retirement is None or self.charges is None:
            return None
        return self.charges[..., 0]

    def events(self, active: Tensor | None = None) -> list[Event]:
        """The privacy events of this answer, to be charged before :meth:`release`.

        Under a source that is seeded, or does not say, a `Caveat` is among them.

        Args:
            active: (N, B) bool, the slots that a filter lets contribute, charged one by one; None:
                no filter, and the charge of the whole answer is the one fixed beforehand.

        Raises:
            ValueError: another set of slots was charged before, or a slot is to be retired where
                charges are those of the whole ensemble.
        """
        self._check_active(active)
        seeded = [Caveat("seeded")] if getattr(self._rng, "seeded", True) else []
        if active is None or self._retirement is None:
            return [*self._events, *seeded]
        if not self._charged:
            self._charged.append(active.clone())
        self._check_charged(active)
        return [*self._retirement.events(active), *seeded]

    def release(self, active: Tensor | None = None) -> Answer:
        """Draws the tokens, or gives log p(target) where targets were proposed.

        One charge pays for one answer: asked again, it returns the same answer, never a new draw.
        """
        self._check_active(active)
        self._check_charged(active)
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
        """What is released is what was charged."""
        if self._retirement is None or (active is None and not self._charged):
            return
        if active is None or not self._charged or not torch.equal(active, self._charged[0]):
            raise ValueError(
                "active must be the slots that events(active) has charged: another set of slots "
                "is another answer"
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

    @abstractmethod
    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        targets: Tensor | None = None,
        rng: RandomSource,
    ) -> Proposal:
        """Prepares the answers of B queries without releasing anything.

        Args:
            private_logits: (N, B, V), raw logits.
            public_logits: (B, V).
            targets: (B,) int64 for evaluation: the answer is log p(target) and no token is drawn.
            rng: source of all randomness (``adapmixed.rng``).

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
    return Proposal(law, public, charges, num_models, tuple(events), targets, rng, retirement)
