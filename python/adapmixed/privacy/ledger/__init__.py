"""The ledger, which keeps charges beyond the process; see docs/how-to/keep-a-ledger.md."""

from adapmixed.privacy.ledger.reading import Reading, read_ledger
from adapmixed.privacy.ledger.writer import LedgerFile

__all__ = ["LedgerFile", "Reading", "read_ledger"]
