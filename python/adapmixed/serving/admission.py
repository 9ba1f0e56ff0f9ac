"""Reserve an answer's tokens before it starts, so that it does not end for want of budget."""

from __future__ import annotations

import logging
import threading

from adapmixed.mechanisms import Mechanism
from adapmixed.privacy import Accountant
from adapmixed.serving.errors import RequestError
from adapmixed.serving.keys import ANYONE, Clients, Key

_LOG = logging.getLogger(__name__)
_RESERVED = (
    "running answers have reserved too many tokens of the ensemble's budget; try again later, or "
    "with fewer max_tokens"
)


class Admission:
    """The tokens of the plan, reserved in memory, and those of keys, counted durably.

    What was charged before is read from the accountant, so a restart begins with the ledger's count
    and no reservations. From then on each charged token moves from the reserved ones to the spent
    ones in one step. So none counts twice. Any thread may call every method.

    Args:
        accountant: charged by the engine alone, and bound to the mechanism.
        mechanism: how queries are answered.
        clients: the keys; None if callers of this machine need none.
    """

    def __init__(
        self, accountant: Accountant, mechanism: Mechanism, clients: Clients | None = None
    ) -> None:
        self._accountant, self._mechanism, self.clients = accountant, mechanism, clients
        self._lock = threading.Lock()
        self._reserved = 0
        self._spent = accountant.planned

    def reserve(self, tokens: int, key: Key = ANYONE) -> Reservation:
        """Reserve tokens of the plan, and count them for a key.

        Args:
            tokens: largest number of tokens of all answers to one query.
            key: the key that asks.

        Raises:
            BudgetSpentError: fewer are left of the plan. Nothing is reserved.
            RequestError: 503: others have reserved what is left; 429: the key has fewer left.
                Nothing is reserved.
            LedgerError: the key's tokens could not be counted durably. Nothing is reserved.
        """
        with self._lock:
            # Public answers cost nothing; a step may be charged before its tokens are freed.
            charged = self._accountant.planned
            self._spent = min(self._spent, charged) if self._reserved else charged
            self._accountant.check_left(self._mechanism, tokens, self._spent)
            planned = self._mechanism.planned_queries
            if planned is not None and self._spent + self._reserved + tokens > planned:
                raise RequestError(503, _RESERVED, "reserved", headers={"retry-after": "5"})
            self._reserved += tokens
        reservation = Reservation(self, tokens)
        if self.clients is not None:
            try:
                self.clients.admit(key, tokens)
            except BaseException:
                reservation.close()
                raise
            reservation.key = key
        return reservation

    @property
    def reserved(self) -> int:
        """Number of tokens that are reserved and not yet charged."""
        return self._reserved

    @property
    def left(self) -> int | None:
        """Number of tokens of the plan that are neither charged nor reserved; None without one."""
        with self._lock:
            return None if (left := self.unspent) is None else left - self._reserved

    @property
    def unspent(self) -> int | None:
        """Number of tokens of the plan that are not charged; None without a plan."""
        planned = self._mechanism.planned_queries
        return None if planned is None else max(0, planned - self._spent)


class Reservation:
    """Tokens that one query has reserved. Any thread may call every method.

    Attributes:
        key: gets back what is not used; None if it was counted for no key.
    """

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission, self._left = admission, tokens
        self.key: Key | None = None

    def charged(self) -> None:
        """Count a token as spent, no longer as reserved."""
        self._free(1, spent=1)

    def close(self) -> None:
        """Free what was not charged. To close twice is allowed."""
        unused = self._free(self._left)
        if self.key is not None and self._admission.clients is not None and unused:
            try:
                self._admission.clients.give_back(self.key, unused)
            except Exception as error:  # the key keeps them counted
                name = type(error).__name__
                _LOG.error("tokens of a key could not be given back: %s", name)

    def _free(self, tokens: int, spent: int = 0) -> int:
        with self._admission._lock:
            freed = min(tokens, self._left)
            self._left -= freed
            self._admission._reserved -= freed
            self._admission._spent += spent
        return freed
