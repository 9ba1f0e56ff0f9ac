"""Reading a ledger without writing to it, while a writer may be at work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from adapmixed.privacy.accountant import Accountant
from adapmixed.privacy.events import Event
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.ledger.errors import (
    LedgerCorruptError,
    LedgerOlderError,
    LedgerWriteError,
)
from adapmixed.privacy.ledger.head import Head, read_head
from adapmixed.privacy.ledger.records import Description, Record, Tail, replay
from adapmixed.privacy.ledger.store import Store


def head_path(path: str) -> str:
    """Where the head file of a database lies."""
    return f"{path}-head"


@dataclass(frozen=True)
class Reading:
    """An intact ledger as it was at one moment.

    Attributes:
        path: of the database.
        description: what the ledger was created for.
        charges: number of records.
        hash: of the last record, 32 bytes; whoever notes it with `charges` can later see whether
            the ledger was rolled back.
        behind: records that the head lacks, 0 or 1; the next writer brings it forward.
        torn: one of the head's slots is not whole (`warning`).
        accountant: the totals.
    """

    path: str
    description: Description
    charges: int
    hash: bytes
    behind: int
    torn: bool
    accountant: Accountant

    @property
    def totals(self) -> Guarantee:
        """The guarantee of everything charged."""
        return self.accountant.epsilon()

    @property
    def warning(self) -> str | None:
        """What the operator should know of an intact ledger, in words."""
        return torn_words(self.charges) if self.torn else None


def read(
    path: str | os.PathLike[str],
    *,
    seen: Callable[[Description, Record, list[Event]], None] | None = None,
) -> Reading:
    """Reads and checks every record.

    Args:
        path: of the database.
        seen: called with every record in turn, before the later ones are checked.

    Raises:
        LedgerCorruptError: altered, truncated, rolled back, or of an unknown format.
        LedgerOlderError: intact, but charged by an older accounting.
        LedgerWriteError: it cannot be read.
    """
    place = os.path.realpath(path)
    if not os.path.lexists(place):
        raise LedgerWriteError(f"{place} must be a ledger, there is no such file")
    # Before the database is read, so that no charge which the head knows may be missing there.
    before = read_head(head_path(place))
    store = Store(place, read_only=True)
    try:
        description = store.description()
        accountant = description.accountant()
        found = None if seen is None else lambda record, events: seen(description, record, events)
        tail = replay(store.rows(), description, accountant, watch=before.count, seen=found)
    finally:
        store.close()
    # A writer may have gone on meanwhile: behind by more than one is judged by the head of now.
    after = read_head(head_path(place))
    check_head(place, tail, before, after)
    behind, torn = max(0, tail.count - after.count), before.torn and after.torn
    return Reading(place, description, tail.count, tail.hash, behind, torn, accountant)


def torn_words(charges: int) -> str:
    """Both readings of a slot that is not whole beside a database that has its charge."""
    return (
        f"the head's slot of charge {charges} is not whole: either it was being written when a "
        "process or the machine ended, and what was charged was not released; or it was damaged "
        "later, and it may have been. The charge is in the database and counted; the next writer "
        "writes the slot anew"
    )


def check_head(path: str, tail: Tail, head: Head, later: Head | None = None) -> None:
    """Raises LedgerCorruptError unless the chain holds what the head says and at most one more;
    LedgerOlderError where it does, and its totals are an older accounting's.

    Args:
        path: of the database.
        tail: of the chain, its hash watched at the head's count.
        head: read before the chain.
        later: read after it, where a writer may be at work.
    """
    if tail.count < head.count:
        raise LedgerCorruptError(
            f"{path} must hold {head.count} charges, as its head says, found {tail.count}: charges "
            f"were lost (an older copy, a truncated file, or a deleted {path}-wal)"
        )
    if tail.count < head.least:
        raise LedgerCorruptError(
            f"{path} must hold {head.least} charges, found {tail.count}: a slot of its head is not "
            "whole, and a crash spoils that of a charge whose record was committed before. The "
            "file was damaged, and a charge may be lost"
        )
    if tail.watched != head.hash:
        raise LedgerCorruptError(f"{path} and its head do not belong together: hashes differ")
    last = later or head
    if tail.count > last.count + 1:
        raise LedgerCorruptError(
            f"{path} holds {tail.count} charges, its head {last.count}: at most one may be missing "
            "there, so the head is an older copy"
        )
    if tail.older is not None:
        raise LedgerOlderError(f"{path} {tail.older}")
