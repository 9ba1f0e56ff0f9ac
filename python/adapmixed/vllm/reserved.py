"""The tokens of a plan that the front process has promised, and the ledger that it reads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from adapmixed.errors import BudgetSpentError
from adapmixed.privacy import read_ledger
from adapmixed.serving.query import ReservedError


def charged_so_far(path: str) -> int:
    """Return the number of queries in a ledger, also while its writer is at work.

    Raises:
        LedgerError: the ledger cannot be read.
    """
    return read_ledger(path, whole=False).account.planned


class Reserved:
    """Reservations of a plan in memory. Any thread may call every method.

    The ledger is read when the reservations since its last reading might exceed the plan. A
    running answer counts with its whole reservation, so the plan is never promised twice.

    Args:
        queries: number of tokens of the plan.
        charged: returns the number of charged tokens, at the time of the call.
    """

    def __init__(self, queries: int, charged: Callable[[], int]) -> None:
        self._queries, self._charged = queries, charged
        self._lock = threading.Lock()
        self._open = 0  # reservations of running answers
        self._read = charged()
        self._since = 0  # reservations that were open at the last reading, or made since

    @property
    def unspent(self) -> int:
        """Number of tokens that were not charged when the ledger was read last."""
        return max(0, self._queries - self._read)

    @property
    def _left(self) -> int:
        """Number of tokens that can be reserved; there may be more, but never fewer."""
        return self._queries - self._read - self._since

    def reserve(self, tokens: int) -> Callable[[], None]:
        """Reserve tokens, all or none; return what ends the reservation. Repeats do nothing.

        Raises:
            BudgetSpentError: the ledger has fewer left. Nothing is reserved.
            ReservedError: running answers might need the tokens. Nothing is reserved.
            LedgerError: the ledger cannot be read.
        """
        with self._lock:
            if tokens > self._left:
                # An answer may end during the reading, but none begins.
                since, read = self._open, self._charged()
                self._since, self._read = since, read
            if tokens > self.unspent:
                raise BudgetSpentError(f"tokens must be <= {self.unspent}, got {tokens}")
            if tokens > self._left:
                raise ReservedError(f"running answers have reserved {self._since} tokens")
            self._open += tokens
            self._since += tokens
        ended = threading.Event()

        def end() -> None:
            with self._lock:
                if not ended.is_set():
                    ended.set()
                    self._open -= tokens

        return end
