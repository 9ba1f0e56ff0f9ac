"""The package's own errors. Bad arguments raise ValueError."""

from __future__ import annotations


class BudgetSpentError(ValueError):
    """A plan has fewer queries left than were asked for. Nothing was charged."""


class LedgerError(Exception):
    """The ledger cannot be used, so nothing may be released."""


class LedgerCorruptError(LedgerError, ValueError):
    """The files are not an intact ledger: altered, damaged or of another format."""


class LedgerMismatchError(LedgerError, ValueError):
    """The ledger was created with other settings."""


class LedgerClosedError(LedgerError, ValueError):
    """The ledger was closed, a charge failed before, or another process opened it."""


class LedgerBusyError(LedgerError, OSError):
    """Another writer holds the ledger."""


class LedgerWriteError(LedgerError, OSError):
    """A file of the ledger cannot be read or written, for example because the disk is full."""


class ProcessError(RuntimeError):
    """Another process of the run has ended or does not answer, so the run is over."""


def missing_extra(what: str, package: str, extra: str, error: ImportError) -> ValueError:
    """Return the error for a missing package that an extra installs."""
    return ValueError(f"{what} needs {package}: pip install 'adapmixed[{extra}]' ({error})")
