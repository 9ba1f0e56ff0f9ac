"""The ledger: charges that outlive the process. See `docs/ledger.md`."""

from adapmixed.privacy.ledger.errors import (
    LedgerBusyError,
    LedgerClosedError,
    LedgerCorruptError,
    LedgerError,
    LedgerMismatchError,
    LedgerOlderError,
    LedgerWriteError,
)
from adapmixed.privacy.ledger.ledger import Ledger
from adapmixed.privacy.ledger.reading import Reading, read

__all__ = [
    "Ledger",
    "LedgerBusyError",
    "LedgerClosedError",
    "LedgerCorruptError",
    "LedgerError",
    "LedgerMismatchError",
    "LedgerOlderError",
    "LedgerWriteError",
    "Reading",
    "read",
]
