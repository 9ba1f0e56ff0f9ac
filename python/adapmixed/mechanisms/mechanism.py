"""The order in which every mechanism answers: propose, charge, release; and the baselines.

    ticket = mechanism.propose(private_logits, public_logits, rng=rng)
    accountant.charge(ticket)                # before anything is released
    answer = ticket.release()

A mechanism whose cost is the same for all rows can be charged before they exist, so that the charge
is written while the models compute them:

    allowance = Allowance(mechanism, num_models, origin)
    accountant.charge_ahead(allowance, queries)  # durable
    allowance.charge(ticket)                 # before ticket.release()

Shapes are written with N models, B positions, V tokens and K orders, as in ``adapmixed_ext``.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import adapmixed_ext as ops
from adapmixed.limits import MOST_DEPTH, MOST_RANGE, active_tokens, check_number, check_rng
from adapmixed.mechanisms.rows import ShapedLogits, shaped
from adapmixed.privacy import BudgetSpentError, Caveat, Event, PublicAnswer, UnprotectedAnswer
from adapmixed.privacy.events import BY_HAND, Origin, Pay
from adapmixed_ext.inputs import prepare
from adapmixed_ext.types import RandomSource

_PROPOSED, _PAYING, _CHARGED = "proposed", "being charged", "charged"
_FAILED = "not charged (its charge failed)"


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
class NextToken:
    """The distribution of the answers and their costs, as a mechanism makes them from rows.

    Attributes:
        rows: logits (N, B, k) and (B, k).
        projection: projection of these rows. Those that take no part in it answer q, whichever
            members contribute.
        events: costs of the answers if all members contribute.
        public: (B,) bool, True for positions that are answered from q; None if none is.
        charges: (N, B) float64, upper bounds of the individual charges; None without such charges.
        losses: (N, B, K) float64, realised losses; None without such losses.
    """

    rows: ShapedLogits
    projection: ops.Projection | ops.Clipping | ops.LogPool
    events: tuple[Event, ...] = ()
    public: Tensor | None = None
    charges: Tensor | None = None
    losses: Tensor | None = None

    def __post_init__(self) -> None:
        # Operators that only queue work have not reported bad rows yet.
        self.projection.check()

    def of_members(self, active: Tensor) -> NextToken:
        """Return the distribution in which only these members contribute and the others answer q.

        Args:
            active: (N, B) bool, True for members that contribute.
        """
        pool = self.projection
        assert isinstance(pool, ops.Clipping | ops.LogPool)  # others have no individual charges
        chosen = active if pool.active is None else active & pool.active
        if isinstance(pool, ops.Clipping):
            return replace(self, projection=replace(pool, active=chosen))
        if bool(chosen.all()) if pool.active is None else torch.equal(chosen, pool.active):
            return self
        restricted = ops.log_pool(
            self.rows.private, self.rows.public, lower=pool.lower, upper=pool.upper,
            scale=pool.scale, num_models=pool.num_models, active=chosen,
            lse_differences=self.rows.lse_differences,
        )  # fmt: skip
        return replace(self, projection=restricted)

    def sample(self, rng: RandomSource) -> Tensor:
        """Draw one token per position; return (B,) int64."""
        drawn = ops.sample(self.probabilities(), self.rows.public, rng=rng)
        return self.rows.released(drawn, rng)

    def probabilities(self) -> Tensor:
        """Return the probabilities of the columns, (B, k) float64. They are private."""
        return ops.mixture(self.rows.private, self.rows.public, self.projection)

    def likeliest(self) -> Tensor:
        """Return the active tokens of largest probability, (B,) int64, for evaluation only."""
        return self.rows.named(self.probabilities()[:, : self.rows.width].argmax(-1))

    def log_prob(self, targets: Tensor) -> Tensor:
        """Return log p(target), (B,) float64, without forming (B, k).

        It is −inf for a target that top-k has removed.
        """
        rows = self.rows
        places, share = rows.places(targets)
        return ops.log_prob(rows.private, rows.public, self.projection, places) + share

    def answer(self, targets: Tensor | None, rng: RandomSource) -> Answer:
        """Draw the tokens, or compute log p(target) if targets are given."""
        public = self.public
        if public is None:
            public = torch.zeros_like(self.rows.public[:, 0], dtype=torch.bool)
        if targets is not None:
            return Answer(None, self.log_prob(targets), public)
        return Answer(self.sample(rng), None, public)


def public_token(rows: ShapedLogits, events: tuple[Event, ...] = ()) -> NextToken:
    """Return q itself, as the mixture of one member of weight 0, without any private value."""
    public_rows = replace(rows, private=rows.public[None])
    inputs = prepare(public_rows.private, public_rows.public)
    weight = torch.zeros_like(inputs.private_lse)
    projection = ops.Projection(weight, *inputs[2:])
    everywhere = torch.ones_like(inputs.public_lse, dtype=torch.bool)
    return NextToken(public_rows, projection, events, everywhere)


class Ticket:
    """An answer that is proposed, then charged once, then released once.

    `Accountant.charge` must come before :meth:`release`.

    Attributes:
        mechanism: mechanism that made the ticket.
        num_models: N.
        origin: the ensemble that the rows come from.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_models: int,
        proposed: NextToken,
        targets: Tensor | None,
        rng: RandomSource,
        origin: Origin,
    ) -> None:
        self.mechanism, self.num_models, self.origin = mechanism, num_models, origin
        self._proposed, self._targets, self._rng = proposed, targets, rng
        self._events = (*proposed.events, *origin.caveats_of(getattr(rng, "seeded", True)))
        charges = proposed.charges
        self._charges = None if charges is None else charges.cpu().numpy()
        self._lock, self._state = threading.Lock(), _PROPOSED
        self._members: NDArray[np.bool_] | None = None
        self._answer: Answer | None = None

    def charge(self, pay: Pay) -> None:
        """Have this ticket paid for. It can be released if `pay` returns, and never if it raises.

        `Accountant.charge` calls this.

        Args:
            pay: function that charges the costs of the ticket, which are private.

        Raises:
            ValueError: the ticket was charged before, or its charge failed.
        """
        with self._lock:
            if self._state != _PROPOSED:
                raise ValueError(
                    f"ticket must be charged once, got one that is {self._state}: propose again"
                )
            self._state = _PAYING
        try:
            self._members = pay(self._events, self._charges)
            self._state = _CHARGED
        finally:
            if self._state != _CHARGED:
                self._state = _FAILED

    def release(self) -> Answer:
        """Draw the tokens, or compute log p(target) if targets were given.

        Every further call returns the same answer.

        Returns:
            The answers to all B queries.

        Raises:
            ValueError: the ticket was not charged.
        """
        with self._lock:
            if self._answer is None:
                self._answer = self._distribution.answer(self._targets, self._rng)
            return self._answer

    @property
    def _distribution(self) -> NextToken:
        """The distribution to draw from, with the members that were charged.

        Evaluation reads it, too.

        Raises:
            ValueError: the ticket was not charged.
        """
        active = self._active
        return self._proposed if active is None else self._proposed.of_members(active)

    @property
    def _active(self) -> Tensor | None:
        """(N, B) bool, members that contribute; None if the whole ensemble was charged."""
        if self._state != _CHARGED:
            raise ValueError(
                "ticket must be charged before its release (Accountant.charge), it is "
                f"{self._state}"
            )
        if self._members is None:
            return None
        return torch.tensor(self._members, device=self._proposed.rows.public.device)


class Allowance:
    """A count of queries that were charged ahead.

    It stands where an accountant would: `charge` lets a ticket be released, or raises.

    Args:
        mechanism: how the queries will be answered.
        num_models: N.
        origin: the ensemble that the rows will come from.
        seeded: whether the randomness will be seeded. A ledger takes no such charge.

    Raises:
        ValueError: the mechanism's cost depends on the rows.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_models: int,
        origin: Origin = BY_HAND,
        *,
        seeded: bool = False,
    ) -> None:
        mechanism.cost_ahead(num_models, 0)
        self.mechanism, self.num_models, self.origin = mechanism, num_models, origin
        self.caveats = origin.caveats_of(seeded)
        self._lock = threading.Lock()
        self._left = 0

    @property
    def left(self) -> int:
        """Number of queries that were charged and are not yet released."""
        return self._left

    def add(self, queries: int) -> None:
        """Add queries that were charged. `Accountant.charge_ahead` calls this.

        Args:
            queries: their number, ≥ 0.
        """
        with self._lock:
            self._left += queries

    def charge(self, ticket: Ticket) -> None:
        """Take a ticket's queries from the count, so that it can be released.

        If this raises, the ticket can never be released, and the count is as before.

        Args:
            ticket: the answers to pay for.

        Raises:
            ValueError: the ticket is not what was charged, or it was charged before.
            BudgetSpentError: fewer queries are left.
        """
        with self._lock:
            ticket.charge(partial(self._take, ticket))

    def _take(self, ticket: Ticket, events: Sequence[Event], charges: object) -> None:
        charged, proposed = (
            (side.mechanism, side.num_models, side.origin.ensemble, side.origin.active_tokens)
            for side in (self, ticket)
        )
        caveats = {event for event in events if isinstance(event, Caveat)}
        if proposed != charged or not caveats <= {*self.caveats}:
            raise ValueError(
                "ticket must be of the mechanism, the number of models, the ensemble, the active "
                "vocabulary and the caveats that were charged in advance"
            )
        queries = sum(getattr(event, "queries", 0) for event in events)
        if queries > self._left:
            raise BudgetSpentError(
                f"queries must be paid for before they are answered: {self._left} are, "
                f"got {queries}"
            )
        self._left -= queries


class Mechanism(ABC):
    """A frozen set of settings that turns logits into answers and privacy events."""

    name: ClassVar[str]
    no_budget: ClassVar[str] = ""
    """The reason why per-shard budgets cannot be kept; "" if they can."""
    no_total: ClassVar[str] = ""
    """The reason why there is no guarantee without per-shard budgets; "" if there is one."""
    no_replacement: ClassVar[str] = ""
    """The reason why there is no guarantee for replace-one; "" if there is one."""

    @property
    def planned_queries(self) -> int | None:
        """Number of queries that the guarantee is planned for; None for any number."""
        return getattr(self, "queries", None)

    @property
    def charge_order(self) -> float | None:
        """Rényi order of the individual charges; None if they are ρ of zCDP, or without any."""
        return None

    def largest_charge(self, num_models: int) -> float | None:
        """Return the largest individual charge of one answer, if its log-ratio has a bounded range.

        Args:
            num_models: N.
        """
        return None

    def cost_ahead(self, num_models: int, queries: int) -> tuple[Event, ...]:
        """Return the cost of queries whose rows do not exist yet.

        Args:
            num_models: N.
            queries: number of queries.

        Raises:
            ValueError: the cost of an answer depends on the rows.
        """
        raise ValueError(
            f"mechanism must be ClippedLogPool to be charged in advance, got {type(self).__name__}"
        )

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
    ) -> Ticket:
        """Prepare the answers to B queries without releasing anything.

        The ticket holds its own copy of the rows, (N + 1) B V logits, so a later change of the
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
            A ticket for `Accountant.charge`.

        Raises:
            ValueError: logits, rng, targets, temperature, top_k or active are not valid.
        """
        rows = shaped(
            private_logits, public_logits, temperature=temperature, top_k=top_k, active=active
        )
        copies = rows.private.clone(), rows.public.clone()
        copied = replace(rows, private=copies[0], public=copies[1], spare=False)
        speaking = active_tokens(active, rows.vocab_size)
        origin = replace(BY_HAND, active_tokens=speaking)
        return self.propose_rows(copied, rng=rng, targets=targets, origin=origin)

    def propose_rows(
        self,
        rows: ShapedLogits,
        *,
        rng: RandomSource,
        targets: Tensor | None = None,
        origin: Origin = BY_HAND,
    ) -> Ticket:
        """Prepare the answers to shaped rows.

        It works as :meth:`propose`, but the rows belong to the ticket from here on: they are not
        copied and must not be changed.

        Args:
            rows: shaped rows from :func:`shaped`.
            rng: source of all randomness.
            targets: (B,) int64 for evaluation; None draws tokens.
            origin: the ensemble that the rows come from.

        Raises:
            ValueError: logits, rng or targets are not valid.
        """
        check_rng(rng)
        rows = rows.with_tail()
        if targets is not None:
            rows.check_targets(targets)
        proposed = self._prepare(rows, rng)
        return Ticket(self, len(rows.private), proposed, targets, rng, origin)

    @abstractmethod
    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        """Return the distribution of the answers and their costs."""


@dataclass(frozen=True)
class PublicOnly(Mechanism):
    """Answers from the public distribution, which cost nothing."""

    name: ClassVar[str] = "public"

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        return public_token(rows, (PublicAnswer(len(rows.public)),))


@dataclass(frozen=True)
class Unprotected(Mechanism):
    """Answers from the plain mean of the private distributions, without any guarantee."""

    name: ClassVar[str] = "unprotected"
    no_budget: ClassVar[str] = "it has no bound that could be charged"

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        inputs = prepare(rows.private, rows.public)
        projection = ops.Projection(torch.ones_like(inputs.private_lse), *inputs[2:])
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

    def _prepare(self, rows: ShapedLogits, rng: RandomSource) -> NextToken:
        widest = min(MOST_RANGE, MOST_DEPTH / self.scale) / 2
        pool = ops.log_pool(
            rows.private, rows.public, lower=-widest, upper=widest, scale=self.scale,
            lse_differences=rows.lse_differences,
        )  # fmt: skip
        return NextToken(rows, pool, (UnprotectedAnswer(len(rows.public)),))
