"""Queries that are charged before their rows exist, and the counter that releases them.

    accountant.charge(Prepayment(mechanism, num_models, queries, origin))  # durable
    prepaid.grant(queries)                            # in the process that draws tokens
    prepaid.charge(proposal)                          # before proposal.release()

One process holds the accountant and another one draws. This needs a mechanism whose cost is the
same for all rows.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from adapmixed.limits import check_count, check_models, check_queries
from adapmixed.mechanisms.clipped_log_pool import ClippedLogPool
from adapmixed.mechanisms.proposal import BY_HAND, Mechanism, Origin, Proposal
from adapmixed.mechanisms.single_charge import Charge
from adapmixed.privacy import BoundedRangeAnswer, BudgetSpentError, Caveat, Event


def check_fixed(mechanism: Mechanism) -> ClippedLogPool:
    """Return the mechanism if its cost is known before its rows are.

    Raises:
        ValueError: the cost of an answer depends on the rows.
    """
    if not isinstance(mechanism, ClippedLogPool):
        raise ValueError(
            "mechanism must be ClippedLogPool to be charged in advance, got "
            f"{type(mechanism).__name__}"
        )
    if mechanism.public_confidence is not None:
        raise ValueError(
            "public_confidence must be None to be charged in advance, got "
            f"{mechanism.public_confidence!r}: public answers cost nothing, and which ones they "
            "are is not known yet"
        )
    return mechanism


class _FixedCharge(Charge):
    """The charge of a prepayment, which has no individual charges."""

    def individual_charges(self) -> NDArray[np.float64]:
        raise ValueError(
            "epsilon must be None for queries that are charged in advance: what a shard spends of "
            "its own budget depends on the rows"
        )


class Prepayment:
    """The cost of queries whose rows do not exist yet, for `Accountant.charge`.

    It can be charged once. A charge that fails may or may not be in the ledger, so it pays for
    nothing.

    Args:
        mechanism: how the queries will be answered.
        num_models: N ≥ 1.
        queries: number of queries, ≥ 1.
        origin: the ensemble that the rows will come from.
        seeded: whether the randomness will be seeded. A ledger takes no such charge.

    Raises:
        ValueError: an argument is not valid, or the mechanism's cost depends on the rows.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        num_models: int,
        queries: int,
        origin: Origin = BY_HAND,
        *,
        seeded: bool = False,
    ) -> None:
        self.mechanism = found = check_fixed(mechanism)
        self.num_models = check_models(num_models)
        self.queries = check_queries(queries)
        self.ensemble, self.active_tokens = origin.ensemble, origin.active_tokens
        self.unit = origin.unit
        event = BoundedRangeAnswer(
            found.scale, found.lower, found.upper, self.num_models, self.queries, found.queries
        )
        self._charge = _FixedCharge([event], caveats(origin, seeded), None, found.measure)

    def _begin(self) -> Charge:
        """Begin the one charge of this prepayment. Only an accountant may call this.

        Raises:
            ValueError: it was charged before, or its charge failed.
        """
        self._charge.begin()
        return self._charge


def caveats(origin: Origin, seeded: bool) -> list[Caveat]:
    """Return the caveats of answers from this origin."""
    return [Caveat(name) for name in (*(("seeded",) if seeded else ()), *origin.caveats)]


class Prepaid:
    """A count of queries that are paid for, in the process that draws their tokens.

    It stands where an accountant would: `charge` lets a proposal be released, or raises.

    Args:
        mechanism: the mechanism that was charged.
        num_models: N that was charged.
        origin: the origin that was charged.
        seeded: whether seeded randomness was charged.

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
        models = check_models(num_models)
        self._of = check_fixed(mechanism), models, origin.ensemble, origin.active_tokens
        self._caveats = frozenset(caveats(origin, seeded))
        self._lock = threading.Lock()
        self._left = 0

    @property
    def left(self) -> int:
        """Number of queries that are paid for and not yet released."""
        return self._left

    def grant(self, queries: int) -> None:
        """Add queries whose prepayment has been charged.

        Args:
            queries: their number, ≥ 0.
        """
        count = check_count("queries", queries, 0)
        with self._lock:
            self._left += count

    def charge(self, proposal: Proposal) -> None:
        """Take a proposal's queries from the count, so that it can be released.

        If this raises, the proposal can never be released, and the count is as before.

        Args:
            proposal: the answers to pay for.

        Raises:
            ValueError: the proposal is not what was charged, or it was charged before.
            BudgetSpentError: fewer queries are left.
        """
        with self._lock:
            begun = proposal._begin()
            try:
                queries = self._checked(proposal, begun.events(None))
                if queries > self._left:
                    raise BudgetSpentError(
                        f"queries must be paid for before they are answered: {self._left} are, "
                        f"got {queries}"
                    )
            except BaseException:
                begun.fail()
                raise
            self._left -= queries
            begun.settle(None)

    def _checked(self, proposal: Proposal, events: Sequence[Event]) -> int:
        """Return the proposal's number of queries; raise unless it is what was charged."""
        of = proposal.mechanism, proposal.num_models, proposal.ensemble, proposal.active_tokens
        if of != self._of:
            raise ValueError(
                "proposal must be of the mechanism, the number of models, the ensemble and the "
                "active vocabulary that were charged in advance"
            )
        named = {event for event in events if isinstance(event, Caveat)}
        if not named <= self._caveats:
            raise ValueError(
                "proposal must have no caveat that was not charged in advance, got "
                f"{sorted(one.name for one in named - self._caveats)}"
            )
        answers = [event for event in events if isinstance(event, BoundedRangeAnswer)]
        return sum(event.queries for event in answers)
