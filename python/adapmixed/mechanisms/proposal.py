"""How every mechanism answers: propose, charge, release.

    proposal = mechanism.propose(private_logits, public_logits, rng=rng)
    accountant.charge(proposal)                # before anything is released
    answer = proposal.release()

N models, B positions, V tokens, K orders, as in ``adapmixed_ext``.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from adapmixed.mechanisms.distribution import Distribution
from adapmixed.mechanisms.rows import Rows, Versions, shaped
from adapmixed.mechanisms.single_charge import Charge
from adapmixed.privacy import Caveat, Event
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class Answer:
    """What a proposal releases.

    Attributes:
        tokens: (B,) int64, or None if targets were given.
        log_prob: (B,) float64, log p(target), or None without targets. Evaluation only: it reveals
            a probability of the mixture.
        public: (B,) bool, answered from the public distribution alone.
    """

    tokens: Tensor | None
    log_prob: Tensor | None
    public: Tensor


@dataclass(frozen=True)
class Origin:
    """Where logits come from.

    Attributes:
        ensemble: fingerprint of the ensemble, None if it is not known.
        caveats: what was not verified of it; every guarantee says it.
    """

    ensemble: str | None = None
    caveats: tuple[str, ...] = ("shards", "base")

    @staticmethod
    def of(ensemble: Any) -> Origin:
        """Return that of an `Ensemble`."""
        return Origin(ensemble.fingerprint, ensemble.unverified)


BY_HAND = Origin()
"""Logits of an ensemble that nothing is known of."""


@dataclass(frozen=True)
class Prepared:
    """What a mechanism makes of rows, before anything is charged.

    Attributes:
        distribution: in which all members contribute.
        public: (B,) bool, positions that are answered from q.
        events: what the answer costs if all members contribute.
        charges: (N, B) float64, individual charges, upper bounds; None if there are none.
        losses: (N, B, K) float64, realised losses; None if there are none.
    """

    distribution: Distribution
    public: Tensor
    events: tuple[Event, ...]
    charges: Tensor | None = None
    losses: Tensor | None = None


class Proposal:
    """An answer that waits to be charged; one charge pays for one answer.

    :meth:`release` needs `Accountant.charge` first. Nothing public draws or settles without it.

    Attributes:
        mechanism: that proposed it.
        num_models: N.
        ensemble: fingerprint of the ensemble, None if it is not known.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_models: int,
        prepared: Prepared,
        targets: Tensor | None,
        rng: RandomSource,
        origin: Origin,
        versions: Versions,
    ) -> None:
        self.mechanism = mechanism
        self.num_models = num_models
        self.ensemble = origin.ensemble
        self._prepared, self._targets, self._rng = prepared, targets, rng
        self._versions = versions
        caveats = [Caveat(name) for name in origin.caveats]
        if getattr(rng, "seeded", True):
            caveats.insert(0, Caveat("seeded"))
        charges = None if prepared.charges is None else prepared.charges.cpu().numpy()
        self._charge = Charge(prepared.events, caveats, charges, mechanism.measure)
        self._answer: Answer | None = None
        self._lock, self._forks = threading.Lock(), _forks

    def _begin(self) -> Charge:
        """Return the one charge that this proposal can have: the accountant alone asks for it.

        Raises:
            ValueError: it was charged before, its charge failed, or another process made it.
        """
        self._check_process()
        self._charge.begin()
        return self._charge

    def release(self) -> Answer:
        """Draw the tokens, or return log p(target) if targets were proposed.

        Every further call returns the same answer.

        Raises:
            ValueError: the proposal was not charged, logits were changed since it was made, or
                another process made it.
        """
        self._check_process()
        with self._lock:
            if self._answer is None:
                self._answer = self._drawn()
            return self._answer

    @property
    def _distribution(self) -> Distribution:
        """What is drawn from, with the members that were charged; evaluation reads it, too.

        Raises:
            ValueError: the proposal was not charged, logits were changed since it was made, or
                another process made it.
        """
        self._check_process()
        active = self._active
        self._versions.check()
        found = self._prepared.distribution
        if active is None or self._prepared.charges is None:
            return found
        return found.of_members(active)

    @property
    def _active(self) -> Tensor | None:
        """(N, B) bool, the members that were charged each on its own."""
        active = self._charge.settled()
        return None if active is None else torch.tensor(active, device=self._prepared.public.device)

    def _drawn(self) -> Answer:
        distribution, public = self._distribution, self._prepared.public
        if self._targets is not None:
            return Answer(None, distribution.log_prob(self._targets), public)
        return Answer(distribution.sample(self._rng), None, public)

    def _check_process(self) -> None:
        # Before the lock, which a thread of the parent may have held at the fork.
        if self._forks != _forks:
            raise ValueError(
                "proposal must be used in the process that made it: parent and child of a fork "
                "would each draw an answer for one charge"
            )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a proposal must not be copied or pickled: one charge pays for one answer")


_forks = 0
"""Forks between the first process and this one: a process id can recur in a new namespace."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class Mechanism(ABC):
    """A frozen configuration that turns logits into answers and privacy events."""

    name: ClassVar[str]
    no_budget: ClassVar[str] = ""
    """Why no budget of every shard can be kept; "" if one can."""

    @property
    def no_total(self) -> str:
        """Why there is no guarantee without a budget of every shard; "" if there is one."""
        return ""

    @property
    def no_replacement(self) -> str:
        """Why there is no guarantee for replaced records (replace-one); "" if there is one."""
        return ""

    @property
    def planned_queries(self) -> int | None:
        """How many queries the guarantee is planned for; None: any number."""
        return getattr(self, "queries", None)

    @property
    def measure(self) -> tuple[str, float | None] | None:
        """Unit of the individual charges: ("zcdp", None), ("renyi", order) or None."""
        return None

    def held_bytes(self, rows: int, vocab_size: int, element: int) -> int:
        """Return the bytes that the answer to one query holds at most besides its logits.

        Here the probabilities and what is drawn from them, three times V float64.

        Args:
            rows: N + 1.
            vocab_size: V.
            element: bytes of a logit.
        """
        return 3 * 8 * vocab_size

    def propose(
        self,
        private_logits: Tensor,
        public_logits: Tensor,
        *,
        rng: RandomSource,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Proposal:
        """Prepare the answers of B queries without releasing anything.

        The proposal holds rows of its own, (N + 1) B V logits. Until it is dropped it also refers
        to the given tensors: changes of these that torch counts raise, others have no effect.

        Args:
            private_logits: (N, B, V), raw logits.
            public_logits: (B, V).
            rng: source of all randomness (``adapmixed.rng``).
            targets: (B,) int64 for evaluation: the answer is log p(target), nothing is drawn.
            temperature, top_k: shape all rows before they are projected (`rows.shaped`).

        Raises:
            ValueError: as the operators, for bad logits or targets.
        """
        rows = shaped(private_logits, public_logits, temperature=temperature, top_k=top_k)
        given = private_logits, public_logits
        return self._proposal(rows.apart_from(*given), given, rng, targets, BY_HAND)

    def propose_rows(
        self,
        rows: Rows,
        *,
        rng: RandomSource,
        targets: Tensor | None = None,
        origin: Origin = BY_HAND,
    ) -> Proposal:
        """Prepare the answers to rows that were shaped, of an ensemble that may be known.

        As :meth:`propose`, but the rows are the proposal's from here on and are not copied. (Those
        of inference mode are: torch does not count their changes.)
        """
        given = rows.private, rows.public
        own = rows.apart_from(*(one for one in given if one.is_inference()))
        return self._proposal(own, given, rng, targets, origin)

    def _proposal(
        self,
        rows: Rows,
        given: tuple[Tensor, Tensor],
        rng: RandomSource,
        targets: Tensor | None,
        origin: Origin,
    ) -> Proposal:
        """Return the proposal of these rows, which like those given must not change."""
        if targets is not None:
            rows.check_targets(targets)
        versions = Versions(*given, rows.private, rows.public)
        prepared = self._prepare(rows, rng)
        return Proposal(self, len(rows.private), prepared, targets, rng, origin, versions)

    @abstractmethod
    def _prepare(self, rows: Rows, rng: RandomSource) -> Prepared:
        """Return the distribution of the answers and what they cost."""
