"""The content of a ledger: settings, records, the chain of hashes through them, and a checkpoint.

The module `writer` explains in which order they are written, and `database` has the SQLite tables.
`encoding` writes the events of a charge, and `account` writes the checkpoint.
docs/reference/file-formats.md shows the whole format.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from adapmixed.errors import LedgerCorruptError
from adapmixed.privacy.account import Account, Binding, Settings
from adapmixed.privacy.encoding import (
    canonical,
    check_keys,
    exactly,
    from_json,
    parse,
    read_event,
    to_json,
)
from adapmixed.privacy.events import Event

FORMAT_VERSION = 8
"""Version of the format. It rises when the content or its meaning changes. Older files are not
read."""


@dataclass(frozen=True)
class Description:
    """The settings that a ledger was created with, which never change.

    Attributes:
        settings: settings of the accountant.
        identity: 32 random hex digits, so that no two ledgers share a chain.
    """

    settings: Settings
    identity: str

    @staticmethod
    def fresh(settings: Settings) -> Description:
        """Return the description of a new ledger."""
        return Description(settings, os.urandom(16).hex())

    @property
    def text(self) -> str:
        """The JSON text that is stored."""
        settings = to_json(self.settings)
        return canonical(
            {"format_version": FORMAT_VERSION, "identity": self.identity, "settings": settings}
        )

    @staticmethod
    def parse(text: str) -> Description:
        """Return the description in a stored text.

        Raises:
            LedgerCorruptError: the text is not a description of this format.
        """
        try:
            values = check_keys(
                "description", parse(text), {"format_version", "identity", "settings"}
            )
            settings = from_json(Settings, values["settings"])
            found = Description(settings, exactly(str, values["identity"]))
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerCorruptError(f"the description could not be read: {error}") from error
        if found.text != text:
            raise LedgerCorruptError(f"the description is not of format {FORMAT_VERSION}: {text}")
        return found

    @property
    def first_hash(self) -> bytes:
        """The link before the first record, 32 bytes."""
        return _hash(b"adapmixed ledger", self.text.encode())


@dataclass(frozen=True)
class Record:
    """One binding, or the events of one charge, as stored.

    Attributes:
        sequence: number of the record, from 1.
        text: JSON text of the binding or the events.
        hash: SHA-256 over the previous hash, the number and the text, 32 bytes.
    """

    sequence: int
    text: str
    hash: bytes

    @staticmethod
    def make(sequence: int, previous: bytes, entry: Mapping[str, Any]) -> Record:
        """Return the record of an entry: {"events": [Event, ...]} or {"binding": Binding}."""
        text = canonical(_written(entry))
        return Record(sequence, text, _link(previous, sequence, text))

    def follows(self, previous: bytes) -> bool:
        """Return True if this is the record after the one with that hash."""
        return self.hash == _link(previous, self.sequence, self.text)

    def entry(self) -> dict[str, Any]:
        """Return the recorded entry: {"events": [Event, ...]} or {"binding": Binding}.

        Raises:
            LedgerCorruptError: an event is unknown, or a field has another type.
        """
        try:
            written = exactly(dict, parse(self.text))
            if set(written) == {"binding"}:
                return {"binding": Binding.read(written["binding"])}
            values = check_keys("record", written, {"events"})
            return {"events": [read_event(one) for one in exactly(list, values["events"])]}
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerCorruptError(
                f"record {self.sequence} could not be read: {error}"
            ) from error


@dataclass(frozen=True)
class Chain:
    """The end of a chain of records.

    Attributes:
        first: link before the first record, 32 bytes.
        count: number of records.
        hash: hash of the last record; without records that of the first link.
        account: account that the records add up to.
    """

    first: bytes
    count: int
    hash: bytes
    account: Account

    @staticmethod
    def start(description: Description) -> Chain:
        """Return the chain of a ledger without records."""
        first = description.first_hash
        return Chain(first, 0, first, Account(description.settings))

    def after(self, record: Record, account: Account) -> Chain:
        """Return the chain with one more record."""
        return Chain(self.first, record.sequence, record.hash, account)


@dataclass(frozen=True)
class Checkpoint:
    """The account after some records, so that a ledger can be opened without reading them all.

    Attributes:
        sequence: number of records.
        text: JSON text of the account.
        digest: SHA-256 that ties it to the ledger's description and to the last record.
    """

    sequence: int
    text: str
    digest: bytes

    @staticmethod
    def make(chain: Chain) -> Checkpoint:
        """Return the checkpoint at the end of a chain."""
        text = canonical(chain.account.written())
        digest = _state_digest(chain.first, chain.count, chain.hash, text)
        return Checkpoint(chain.count, text, digest)

    def account(self, description: Description, last: bytes) -> Account:
        """Return the account of the checkpoint.

        Raises:
            LedgerCorruptError: the checkpoint belongs to another ledger, or not to the record with
                the hash `last`.
        """
        if self.digest != _state_digest(description.first_hash, self.sequence, last, self.text):
            raise LedgerCorruptError(
                "the checkpoint does not fit the last record and the description"
            )
        try:
            return Account.read(description.settings, parse(self.text))
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerCorruptError(f"the checkpoint could not be read: {error}") from error


def replay(records: Iterable[Record], description: Description) -> Iterable[tuple[Record, Chain]]:
    """Check every record in order, charge it, and yield it with the chain up to it.

    Raises:
        LedgerCorruptError: a record was altered, is missing or is unknown.
    """
    chain = Chain.start(description)
    for record in records:
        if record.sequence != chain.count + 1:
            raise LedgerCorruptError(f"record {chain.count + 1} is missing")
        if not record.follows(chain.hash):
            raise LedgerCorruptError(f"record {record.sequence} was altered: its hash does not fit")
        chain = chain.after(record, charged(chain.account, record))
        yield record, chain


def charged(account: Account, record: Record) -> Account:
    """Return the account with one more record."""
    entry = record.entry()
    try:
        if "binding" in entry:
            return account.bound(entry["binding"])
        return account.added(entry["events"])
    except ValueError as error:
        raise LedgerCorruptError(f"record {record.sequence} cannot be charged: {error}") from error


def _written(entry: Mapping[str, Any]) -> dict[str, Any]:
    if "events" not in entry:
        return {"binding": to_json(entry["binding"])}
    events: Iterable[Event] = entry["events"]
    return {"events": [to_json(event) for event in events]}


def _link(previous: bytes, sequence: int, text: str) -> bytes:
    return _hash(b"adapmixed ledger record", previous, b"%d" % sequence, text.encode())


def _state_digest(first: bytes, sequence: int, last: bytes, text: str) -> bytes:
    return _hash(b"adapmixed ledger checkpoint", first, b"%d" % sequence, last, text.encode())


def _hash(*parts: bytes) -> bytes:
    """Return SHA-256 over parts and their lengths, so that no two lists hash the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
