"""The ledger: charges that outlive the process. See `docs/ledger.md`."""

from adapmixed.privacy.ledger.reading import Reading, read_ledger
from adapmixed.privacy.ledger.writer import LedgerFile

__all__ = ["LedgerFile", "Reading", "read_ledger"]
