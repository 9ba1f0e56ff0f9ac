"""The ledger: charges that outlive the process. See `docs/ledger.md`."""

from adapmixed.privacy.ledger.file import LedgerFile
from adapmixed.privacy.ledger.reading import Reading, read_ledger

__all__ = ["LedgerFile", "Reading", "read_ledger"]
