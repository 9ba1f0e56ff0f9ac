"""The order in which every mechanism answers: propose, charge, release.

    proposal = mechanism.propose(private_logits, public_logits, rng=rng)
    accountant.charge(proposal)                # before anything is released
    answer = proposal.release()

Shapes are written with N models, B positions, V tokens and K orders, as in ``adapmixed_ext``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from adapmixed.limits import active_tokens, check_rng
from adapmixed.mechanisms.distribution import Distribution
from adapmixed.mechanisms.rows import Rows, shaped
from adapmixed.mechanisms.single_charge import Charge
from adapmixed.privacy import Caveat, Event
from adapmixed_ext.types import RandomSource


@dataclass(frozen=True)
class Answer:
    """The released answers to B queries.

    Attributes:
        tokens: (B,) int64, the drawn tokens; None if targets were given.
        log_prob: (B,) float64, log p(target); None without targets. It reveals a probability of the
            mixture, so it is for evaluation only.
        public: (B,) bool, True if the public distribution alone answered.
    """

    tokens: Tensor | None
    log_prob: Tensor | None
    public: Tensor


@dataclass(frozen=True)
class Origin:
    """The ensemble that rows come from, and the tokens about which its members speak.

    Attributes:
        ensemble: fingerprint of the ensemble; None if it is not known.
        caveats: names of assumptions that were not verified. Every guarantee names them.
        active_tokens: K of the active vocabulary; None if members speak about all tokens.
        unit: the column whose every name has a member of its own; None if shards are protected.
    """

    ensemble: str | None = None
    caveats: tuple[str, ...] = ("shards", "base")
    active_tokens: int | None = None
    unit: str | None = None

    @staticmethod
    def of(ensemble: Any, active: int | None) -> Origin:
        """Return the origin of an `Ensemble`'s rows with this active vocabulary."""
        speaking = active_tokens(active, ensemble.vocab_size)
        return Origin(ensemble.fingerprint, ensemble.unverified, speaking, ensemble.unit)


BY_HAND = Origin()
"""Origin of logits whose ensemble is not known."""


@dataclass(frozen=True)
class Prepared:
    """The prepared answers of a mechanism, before anything is charged.

    Attributes:
        distribution: distribution to which all members contribute.
        public: (B,) bool, True for positions that are answered from q.
        events: costs of the answers if all members contribute.
        charges: (N, B) float64, upper bounds of the individual charges; None without such charges.
        losses: (N, B, K) float64, realised losses; None without such losses.
    """

    distribution: Distribution
    public: Tensor
    events: tuple[Event, ...]
    charges: Tensor | None = None
    losses: Tensor | None = None


class Proposal:
    """An answer that waits to be charged. One charge pays for one answer.

    `Accountant.charge` must come before :meth:`release`.

    Attributes:
        mechanism: mechanism that made the proposal.
        num_models: N.
        ensemble: fingerprint of the ensemble; None if it is not known.
        active_tokens: K of the active vocabulary; None if members speak about all tokens.
        unit: as in `Origin`.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_models: int,
        prepared: Prepared,
        targets: Tensor | None,
        rng: RandomSource,
        origin: Origin,
    ) -> None:
        self.mechanism = mechanism
        self.num_models = num_models
        self.ensemble = origin.ensemble
        self.active_tokens, self.unit = origin.active_tokens, origin.unit
        self._prepared, self._targets, self._rng = prepared, targets, rng
        caveats = [Caveat(name) for name in origin.caveats]
        if getattr(rng, "seeded", True):
            caveats.insert(0, Caveat("seeded"))
        charges = None if prepared.charges is None else prepared.charges.cpu().numpy()
        self._charge = Charge(prepared.events, caveats, charges, mechanism.measure)
        self._answer: Answer | None = None
        self._lock = threading.Lock()

    def _begin(self) -> Charge:
        """Begin the one charge of this proposal. Only an accountant may call this.

        Raises:
            ValueError: the proposal was charged before, or its charge failed.
        """
        self._charge.begin()
        return self._charge

    def release(self) -> Answer:
        """Draw the tokens, or compute log p(target) if targets were given.

        Every further call returns the same answer.

        Returns:
            The answers to all B queries.

        Raises:
            ValueError: the proposal was not charged.
        """
        with self._lock:
            if self._answer is None:
                self._answer = self._drawn()
            return self._answer

    @property
    def _distribution(self) -> Distribution:
        """The distribution to draw from, with the members that were charged.

        Evaluation reads it, too.

        Raises:
            ValueError: the proposal was not charged.
        """
        active = self._active
        found = self._prepared.distribution
        if active is None or self._prepared.charges is None:
            return found
        return found.of_members(active)

    @property
    def _active(self) -> Tensor | None:
        """(N, B) bool, members that contribute; None if the whole ensemble was charged."""
        active = self._charge.settled()
        return None if active is None else torch.tensor(active, device=self._prepared.public.device)

    def _drawn(self) -> Answer:
        distribution, public = self._distribution, self._prepared.public
        if self._targets is not None:
            return Answer(None, distribution.log_prob(self._targets), public)
        return Answer(distribution.sample(self._rng), None, public)


class Mechanism(ABC):
    """A frozen set of settings that turns logits into answers and privacy events."""

    name: ClassVar[str]
    no_budget: ClassVar[str] = ""
    """The reason why per-shard budgets cannot be kept; "" if they can."""

    @property
    def no_total(self) -> str:
        """The reason why there is no guarantee without per-shard budgets; "" if there is one."""
        return ""

    @property
    def no_replacement(self) -> str:
        """The reason why there is no guarantee for replace-one; "" if there is one."""
        return ""

    @property
    def planned_queries(self) -> int | None:
        """Number of queries that the guarantee is planned for; None for any number."""
        return getattr(self, "queries", None)

    @property
    def measure(self) -> tuple[str, float | None] | None:
        """Unit of the individual charges: ("zcdp", None), ("renyi", order) or None without any."""
        return None

    def largest_charge(self, num_models: int) -> float | None:
        """Return the largest individual charge of one answer, if its log-ratio has a bounded range.

        Args:
            num_models: N.
        """
        return None

    def held_bytes(self, rows: int, vocab_size: int, element: int) -> int:
        """Return the largest number of bytes that one answer holds in addition to its logits.

        By default these are the probabilities and the data of the draw, three times V float64.

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
        active: int | None = None,
    ) -> Proposal:
        """Prepare the answers to B queries without releasing anything.

        The proposal holds its own copy of the rows, (N + 1) B V logits, so a later change of the
        given tensors has no effect on the answer.

        Args:
            private_logits: (N, B, V) raw logits, float32, bfloat16 or float16.
            public_logits: (B, V) raw logits of the same dtype and device.
            rng: source of all randomness (``adapmixed.rng``).
            targets: (B,) int64 for evaluation: the answer is log p(target), and no token is drawn.
                None draws tokens.
            temperature: divides all rows before they are projected; see :func:`shaped`.
            top_k: number of the likeliest public tokens that all rows keep; None for all.
            active: number of the likeliest public tokens about which members speak; None for all.

        Returns:
            A proposal for `Accountant.charge`.

        Raises:
            ValueError: logits, rng, targets, temperature, top_k or active are not valid.
        """
        rows = shaped(
            private_logits, public_logits, temperature=temperature, top_k=top_k, active=active
        )
        own = rows.apart_from(private_logits, public_logits)
        speaking = active_tokens(active, rows.vocab_size)
        return self._proposal(own, rng, targets, replace(BY_HAND, active_tokens=speaking))

    def propose_rows(
        self,
        rows: Rows,
        *,
        rng: RandomSource,
        targets: Tensor | None = None,
        origin: Origin = BY_HAND,
    ) -> Proposal:
        """Prepare the answers to shaped rows.

        It works as :meth:`propose`, but the rows belong to the proposal from here on: they are not
        copied and must not be changed.

        Args:
            rows: shaped rows from :func:`shaped`.
            rng: source of all randomness.
            targets: (B,) int64 for evaluation; None draws tokens.
            origin: the ensemble that the rows come from.

        Raises:
            ValueError: logits, rng or targets are not valid.
        """
        return self._proposal(rows, rng, targets, origin)

    def _proposal(
        self,
        rows: Rows,
        rng: RandomSource,
        targets: Tensor | None,
        origin: Origin,
    ) -> Proposal:
        """Return the proposal for these rows, which may not change."""
        check_rng(rng)
        rows = rows.with_tail()
        if targets is not None:
            rows.check_targets(targets)
        prepared = self._prepare(rows, rng)
        return Proposal(self, len(rows.private), prepared, targets, rng, origin)

    @abstractmethod
    def _prepare(self, rows: Rows, rng: RandomSource) -> Prepared:
        """Return the distribution of the answers and their costs."""
