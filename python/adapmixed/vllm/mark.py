"""The secret that shows the scheduler that a request has passed the gate."""

from __future__ import annotations

import secrets
from pathlib import Path

from adapmixed.files import write_file


def mark_path(ledger: str) -> Path:
    """Return the file of a server's secret, in the ledger's folder."""
    return Path(f"{ledger}.gate")


def new_mark(ledger: str) -> bytes:
    """Write a new secret, which its owner alone can read, and return it."""
    mark = secrets.token_urlsafe(32).encode("ascii")
    write_file(mark_path(ledger), mark, mode=0o600)
    return mark


def read_mark(ledger: str) -> str:
    """Return the secret that the running scheduler has written.

    Raises:
        OSError: there is none.
    """
    return mark_path(ledger).read_bytes().decode("ascii")
