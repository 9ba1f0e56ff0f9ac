"""Reads a ledger without writing to it, also while a writer is at work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from adapmixed.errors import LedgerCorruptError, LedgerError, LedgerWriteError
from adapmixed.privacy.account import Account
from adapmixed.privacy.epsilon import guarantee_of
from adapmixed.privacy.guarantee import Guarantee
from adapmixed.privacy.ledger.database import at_rest
from adapmixed.privacy.ledger.records import Chain, Checkpoint, Description, Record, replay
from adapmixed.privacy.ledger.store import Store


@dataclass(frozen=True)
class Reading:
    """An intact ledger as it was at one moment.

    Attributes:
        path: path of the database.
        description: settings that the ledger was created with.
        charges: number of records.
        digest: hash of the last record, 64 hex digits. Note it elsewhere, to notice later if an
            older copy of the ledger was put back.
        account: settings, binding and totals. Private.
    """

    path: str
    description: Description
    charges: int
    digest: str
    account: Account

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of all charges."""
        settings = self.account.settings
        return guarantee_of(self.account, settings.delta, settings.adjacency)


def read_ledger(
    path: str | os.PathLike[str],
    *,
    seen: Callable[[Record], None] | None = None,
    whole: bool = True,
) -> Reading:
    """Read and check every record of a ledger, also while a writer has it open.

    Args:
        path: path of the database.
        whole: if False, check the last two records and the checkpoint alone, as an opening does.
        seen: function that is called with every record in order, before the next one is checked.

    Returns:
        The ledger's records, guarantee and digest at this moment. They are private.

    Raises:
        LedgerCorruptError: the ledger was altered, or it has another format.
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
            reading = _read(place, once, whole, immutable=True)
        except LedgerError:
            if _at_rest(place) == rest:
                raise
        else:
            if _at_rest(place) == rest:
                return reading
    return _read(place, once, whole, immutable=False)


def _at_rest(place: str) -> tuple[int, ...] | None:
    try:
        return at_rest(place)
    except OSError as error:
        raise LedgerWriteError(f"{place} could not be read: {error}") from error


def _read(place: str, seen: Callable[[Record], None], whole: bool, *, immutable: bool) -> Reading:
    store = Store(place, read_only=True, immutable=immutable)
    try:
        description, checkpoint = store.description(), store.checkpoint()
        chain = Chain.start(description) if whole else store.chain()
        for record, chain in replay(store.records(), description) if whole else ():  # noqa: B007
            seen(record)
    finally:
        store.close()
    if checkpoint != Checkpoint.make(chain):
        raise LedgerCorruptError(f"{place}: the checkpoint is not what the records give")
    return Reading(place, description, chain.count, chain.hash.hex(), chain.account)
