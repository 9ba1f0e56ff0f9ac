"""Reads a ledger without writing to it, also while a writer is at work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from adapmixed.errors import LedgerCorruptError, LedgerError, LedgerWriteError
from adapmixed.privacy.account import Account
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.ledger.database import at_rest
from adapmixed.privacy.ledger.head import Head, head_path, read_head
from adapmixed.privacy.ledger.records import Chain, Checkpoint, Description, Record, replay
from adapmixed.privacy.ledger.store import Store


@dataclass(frozen=True)
class Reading:
    """An intact ledger as it was at one moment.

    Attributes:
        path: path of the database.
        description: settings that the ledger was created with.
        charges: number of records.
        digest: hash of the last record, 64 hex digits. Note it elsewhere together with `charges`,
            to notice later if older copies of all files were put back.
        behind: number of records that the head lacks, 0 or 1. The next writer adds it.
        torn: True if one of the head's slots is not whole; see `warning`.
        account: settings, binding and totals. Private.
    """

    path: str
    description: Description
    charges: int
    digest: str
    behind: int
    torn: bool
    account: Account

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all charges."""
        settings = self.account.settings
        return self.account.guarantee(settings.delta, settings.adjacency)

    @property
    def warning(self) -> str | None:
        """A warning to the operator about the head file; None if there is none."""
        return torn_words(self.charges) if self.torn else None


def read_ledger(
    path: str | os.PathLike[str], *, seen: Callable[[Record], None] | None = None
) -> Reading:
    """Read and check every record of a ledger, also while a writer has it open.

    Args:
        path: path of the database.
        seen: function that is called with every record in order, before the next one is checked.

    Returns:
        The ledger's records, guarantee and digest at this moment. They are private.

    Raises:
        LedgerCorruptError: the ledger was altered, truncated or rolled back, or it has another
            format.
        LedgerWriteError: the ledger cannot be read.
    """
    place = os.path.realpath(path)
    if not os.path.lexists(place):
        raise LedgerWriteError(f"{place} must be a ledger, but there is no such file")
    if os.path.isdir(place):
        raise LedgerWriteError(f"{place} must be the database file of a ledger, got a folder")
    shown = 0

    def once(record: Record) -> None:
        nonlocal shown
        if seen is not None and record.sequence > shown:
            shown = record.sequence
            seen(record)

    # A closed ledger is read without SQLite's log, which a read-only folder could not hold. If a
    # writer came meanwhile, the ledger is read again with the log.
    rest = _at_rest(place)
    if rest is not None:
        try:
            reading = _read(place, once, immutable=True)
        except LedgerError:
            if _at_rest(place) == rest:
                raise
        else:
            if _at_rest(place) == rest:
                return reading
    return _read(place, once, immutable=False)


def _at_rest(place: str) -> tuple[int, ...] | None:
    try:
        return at_rest(place)
    except OSError as error:
        raise LedgerWriteError(f"{place} could not be read: {error}") from error


def _read(place: str, seen: Callable[[Record], None], *, immutable: bool) -> Reading:
    # The head is read first, so that the database must hold every charge that the head names.
    before = read_head(head_path(place))
    store = Store(place, read_only=True, immutable=immutable)
    try:
        description, checkpoint = store.description(), store.checkpoint()
        chain = Chain.start(description)
        for record, chain in replay(store.records(), description):  # noqa: B007
            seen(record)
    finally:
        store.close()
    if checkpoint != Checkpoint.make(chain):
        raise LedgerCorruptError(f"{place}: the checkpoint is not what the records give")
    check_head(place, chain, before)
    # A writer may have charged meanwhile, so the head is read again before it counts as too old.
    after = read_head(head_path(place))
    if chain.count > after.count + 1:
        raise old_head(place, chain, after)
    behind, torn = max(0, chain.count - after.count), before.torn and after.torn
    digest = chain.hashes[0].hex()
    return Reading(place, description, chain.count, digest, behind, torn, chain.account)


def torn_words(charges: int) -> str:
    """Return the warning about a damaged head slot whose charge is in the database."""
    return (
        f"the head's slot of charge {charges} is not whole: either a process or the machine ended "
        "while it was being written, and the answer was not released, or it was damaged later, and "
        "the answer may have been released; the charge is counted, and the next writer repairs the "
        "slot"
    )


def check_head(path: str, chain: Chain, head: Head) -> None:
    """Raise LedgerCorruptError unless the chain ends where the head says, or later.

    Args:
        path: path of the database.
        chain: end of the chain, read after the head.
        head: the head. Its hash is compared if the chain ends there or one record later.
    """
    if chain.count < head.count:
        raise LedgerCorruptError(
            f"{path} must hold {head.count} charges, as its head says, found {chain.count}: "
            f"charges were lost (an older copy, a truncated file, or a deleted {path}-wal)"
        )
    if chain.count < head.least:
        raise LedgerCorruptError(
            f"{path} must hold {head.least} charges, found {chain.count}: the file was damaged "
            "and a charge may be lost, because a slot of its head is not whole and no crash can "
            "spoil a slot before its charge is in the database"
        )
    known = {chain.count: chain.hashes[0], chain.count - 1: chain.hashes[1]}
    if known.get(head.count, head.hash) != head.hash:
        raise LedgerCorruptError(f"{path} and its head do not belong together: their hashes differ")


def old_head(path: str, chain: Chain, head: Head) -> LedgerCorruptError:
    """Return the error for a head that lacks more than one record."""
    return LedgerCorruptError(
        f"{path} holds {chain.count} charges and its head {head.count}: the head may lack at most "
        "one, so the head is an older copy"
    )
