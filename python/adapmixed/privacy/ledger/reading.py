"""Reading a ledger without writing to it, while a writer may be at work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from adapmixed.errors import LedgerCorruptError, LedgerWriteError
from adapmixed.privacy.account import Account
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.ledger.head import Head, head_path, read_head
from adapmixed.privacy.ledger.records import Chain, Checkpoint, Description, Record, replay
from adapmixed.privacy.ledger.store import Store


@dataclass(frozen=True)
class Reading:
    """An intact ledger as it was at one moment.

    Attributes:
        path: of the database.
        description: what the ledger was created for.
        charges: number of records.
        digest: of the last record, 64 hex digits. Note it with `charges` elsewhere to notice later
            whether older copies of all files were put back.
        behind: records that the head lacks, 0 or 1; the next writer brings it forward.
        torn: one of the head's slots is not whole (`warning`).
        account: settings, binding and totals: private.
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
        """The guarantee of everything charged."""
        settings = self.account.settings
        return self.account.guarantee(settings.delta, settings.adjacency)

    @property
    def warning(self) -> str | None:
        """What the operator should know of an intact ledger."""
        return torn_words(self.charges) if self.torn else None


def read_ledger(
    path: str | os.PathLike[str], *, seen: Callable[[Record], None] | None = None
) -> Reading:
    """Read and check every record of a ledger, also while a writer has it open.

    Args:
        path: of the database.
        seen: called with every record in turn, before the later ones are checked.

    Raises:
        LedgerCorruptError: altered, truncated, rolled back, or of another format.
        LedgerWriteError: it cannot be read.
    """
    place = os.path.realpath(path)
    if not os.path.lexists(place):
        raise LedgerWriteError(f"{place} must be a ledger, there is no such file")
    # Before the database is read, so that no charge which the head knows may be missing there.
    before = read_head(head_path(place))
    store = Store(place, read_only=True)
    try:
        description, checkpoint = store.description(), store.checkpoint()
        chain = Chain.start(description)
        for record, chain in replay(store.records(), description):  # noqa: B007
            if seen is not None:
                seen(record)
    finally:
        store.close()
    if checkpoint != Checkpoint.make(chain):
        raise LedgerCorruptError(f"{place}: the checkpoint is not what the records give")
    check_head(place, chain, before)
    # A writer may have gone on meanwhile: behind by more than one is judged by the head of now.
    after = read_head(head_path(place))
    if chain.count > after.count + 1:
        raise old_head(place, chain, after)
    behind, torn = max(0, chain.count - after.count), before.torn and after.torn
    digest = chain.hashes[0].hex()
    return Reading(place, description, chain.count, digest, behind, torn, chain.account)


def torn_words(charges: int) -> str:
    """Return both readings of a head slot that is not whole beside a database with its charge."""
    return (
        f"the head's slot of charge {charges} is not whole: either it was being written when a "
        "process or the machine ended, and what was charged was not released; or it was damaged "
        "later, and it may have been. The charge is in the database and counted; the next writer "
        "writes the slot anew"
    )


def check_head(path: str, chain: Chain, head: Head) -> None:
    """Raise LedgerCorruptError unless the chain ends where the head says, or further on.

    Args:
        path: of the database.
        chain: read after the head.
        head: of which the hash is compared if the chain ends there or one record later.
    """
    if chain.count < head.count:
        raise LedgerCorruptError(
            f"{path} must hold {head.count} charges, as its head says, found {chain.count}: "
            f"charges were lost (an older copy, a truncated file, or a deleted {path}-wal)"
        )
    if chain.count < head.least:
        raise LedgerCorruptError(
            f"{path} must hold {head.least} charges, found {chain.count}: a slot of its head is "
            "not whole, and a crash spoils that of a charge whose record was committed before. The "
            "file was damaged, and a charge may be lost"
        )
    known = {chain.count: chain.hashes[0], chain.count - 1: chain.hashes[1]}
    if known.get(head.count, head.hash) != head.hash:
        raise LedgerCorruptError(f"{path} and its head do not belong together: hashes differ")


def old_head(path: str, chain: Chain, head: Head) -> LedgerCorruptError:
    """Return the error for a head that lacks more than one record."""
    return LedgerCorruptError(
        f"{path} holds {chain.count} charges, its head {head.count}: at most one may be missing "
        "there, so the head is an older copy"
    )
