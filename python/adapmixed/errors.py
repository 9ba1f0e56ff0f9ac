"""Errors of the package. Bad arguments raise plain ValueErrors."""

from __future__ import annotations


class BudgetSpentError(ValueError):
    """Fewer queries are left of a plan than were asked for; nothing was charged."""


class LedgerError(Exception):
    """The ledger cannot be used; nothing may be released on it."""


class LedgerCorruptError(LedgerError, ValueError):
    """The files are not an intact ledger: altered, truncated, rolled back or unknown."""


class LedgerMismatchError(LedgerError, ValueError):
    """The ledger was created for something else."""


class LedgerClosedError(LedgerError, ValueError):
    """The ledger was closed, failed before, or belongs to another process."""


class LedgerBusyError(LedgerError, OSError):
    """Another writer holds the ledger."""


class LedgerWriteError(LedgerError, OSError):
    """A file could not be read or written: full disk, missing permission, failed device."""


class ProcessError(RuntimeError):
    """Another process of the run has ended or does not answer: the run is over."""
