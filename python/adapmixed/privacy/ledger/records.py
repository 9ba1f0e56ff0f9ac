"""What a ledger holds: its description, its records, and the chain of hashes through them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from adapmixed.privacy.accountant import Accountant
from adapmixed.privacy.event_fields import VERSION
from adapmixed.privacy.events import Event
from adapmixed.privacy.fields import canonical, parse
from adapmixed.privacy.filter_budget import FilterBudget
from adapmixed.privacy.ledger.codec import decode, encode
from adapmixed.privacy.ledger.errors import LedgerCorruptError, LedgerMismatchError
from adapmixed.privacy.ledger.totals import compare, totals_of

FORMAT_VERSION = VERSION
"""Rises when records or their meaning change, the computed totals of old records included."""


@dataclass(frozen=True)
class Description:
    """What a ledger was created for; fixed from then on.

    Attributes:
        delta, rule, order_weights, adjacency, filter_budget: of the accountant.
        configuration: the mechanism, in the words of whoever opens the ledger.
        identity: 32 hex digits drawn at creation, so that no two ledgers share a chain.
        format_version: of the records; an older ledger goes on in its own.
    """

    delta: float
    rule: str
    order_weights: tuple[float, ...] | None
    adjacency: str | None
    filter_budget: FilterBudget | None
    configuration: str
    identity: str
    format_version: int = FORMAT_VERSION

    @staticmethod
    def fresh(accountant: Accountant, configuration: str) -> Description:
        """Of a ledger that is created now."""
        return Description(
            accountant.delta,
            accountant.rule,
            accountant.order_weights,
            accountant.adjacency,
            accountant.filter_budget,
            configuration,
            os.urandom(16).hex(),
        )

    def _fields(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.format_version < 3 and self.filter_budget is not None:  # no counts were reserved
            del fields["filter_budget"]["releases"], fields["filter_budget"]["sigma"]
        return fields

    @cached_property
    def text(self) -> str:
        """As it is stored."""
        return canonical(self._fields())

    @staticmethod
    def parse(text: str) -> Description:
        """The description in a stored text, else LedgerCorruptError."""
        try:
            fields = parse(text)
            if fields["order_weights"] is not None:
                fields["order_weights"] = tuple(fields["order_weights"])
            if fields["filter_budget"] is not None:
                fields["filter_budget"] = FilterBudget(**fields["filter_budget"])
            description = Description(**fields)
            description.accountant()
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerCorruptError(f"the description could not be read: {error}") from error
        version = description.format_version
        known = type(version) is int and 1 <= version <= FORMAT_VERSION
        if description.text != text or not known:
            raise LedgerCorruptError(
                f"the description is not of a format up to {FORMAT_VERSION}: {text}"
            )
        return description

    def accountant(self) -> Accountant:
        """An accountant without charges."""
        return Accountant(
            self.delta,
            rule=self.rule,
            order_weights=self.order_weights,
            adjacency=self.adjacency,
            filter_budget=self.filter_budget,
        )

    def require(self, wanted: Description) -> None:
        """Raises LedgerMismatchError unless `wanted` differs in nothing but its identity."""
        self._require_counts(wanted)
        for name in asdict(self).keys() - {"identity", "format_version"}:
            here, there = getattr(self, name), getattr(wanted, name)
            if here != there:
                given = f"{here!r}, got {there!r}"
                if name == "configuration":
                    given += (
                        ": another mechanism or ensemble, also one of which a member was retrained "
                        "or withdrawn, needs a ledger of its own"
                    )
                raise LedgerMismatchError(
                    f"{name} must be what the ledger was created with, {given}"
                )

    def _require_counts(self, wanted: Description) -> None:
        here, there = self.filter_budget, wanted.filter_budget
        if here is None or there is None or here == there:
            return
        if replace(here, releases=0, sigma=None) == replace(there, releases=0, sigma=None):
            raise LedgerMismatchError(
                "filter_budget must reserve what it did when the ledger was created, "
                f"{_count_words(here)}, got {_count_words(there)}: counts are paid for before the "
                "first answer"
            )

    @cached_property
    def configuration_hash(self) -> bytes:
        """SHA-256 of everything but the identity, 32 bytes; part of every record."""
        fields = {name: value for name, value in self._fields().items() if name != "identity"}
        return hashlib.sha256(canonical(fields).encode()).digest()

    @property
    def first_hash(self) -> bytes:
        """The link before the first record, 32 bytes."""
        return _hash(b"adapmixed ledger", self.text.encode())


def _count_words(budget: FilterBudget) -> str:
    if budget.sigma is None:
        return "no noisy counts"
    return f"{budget.releases} noisy counts of standard deviation {budget.sigma!r}"


@dataclass(frozen=True)
class Record:
    """One charge, as stored. `sequence` counts from 1; `totals` are those after it."""

    sequence: int
    format_version: int
    configuration: bytes
    events: str
    charges: bytes
    totals: str
    hash: bytes

    @staticmethod
    def make(
        description: Description,
        sequence: int,
        previous: bytes,
        events: Sequence[Event],
        accountant: Accountant,
    ) -> Record:
        """The record of `events`, whose sum with all before them `accountant` holds."""
        version, configuration = description.format_version, description.configuration_hash
        written, charges = encode(events, version)
        totals = canonical(totals_of(accountant))
        fields = (sequence, version, configuration, written, charges, totals)
        return Record(*fields, _link(previous, *fields))

    @staticmethod
    def of_row(row: Sequence[Any]) -> Record:
        """A row of the database, else LedgerCorruptError."""
        if tuple(map(type, row)) != (int, int, bytes, str, bytes, str, bytes):
            raise LedgerCorruptError(f"record {row[0]!r} does not have the columns of a record")
        return Record(*row)

    def check(self, description: Description, sequence: int, previous: bytes) -> None:
        """Raises LedgerCorruptError unless this is the record after `previous`."""
        if self.sequence != sequence:
            raise LedgerCorruptError(f"record {sequence} is missing, found {self.sequence}")
        fields = (self.sequence, self.format_version, self.configuration)
        if _link(previous, *fields, self.events, self.charges, self.totals) != self.hash:
            raise LedgerCorruptError(f"record {sequence} was altered: its hash does not fit")
        if self.format_version != description.format_version:
            raise LedgerCorruptError(
                f"format_version of record {sequence} must be {description.format_version}, got "
                f"{self.format_version}"
            )
        if self.configuration != description.configuration_hash:
            raise LedgerCorruptError(f"record {sequence} belongs to another configuration")


def _link(
    previous: bytes,
    sequence: int,
    format_version: int,
    configuration: bytes,
    events: str,
    charges: bytes,
    totals: str,
) -> bytes:
    numbers = b"%d %d" % (sequence, format_version)
    parts = (previous, numbers, configuration, events.encode(), charges, totals.encode())
    return _hash(b"adapmixed ledger record", *parts)


def _hash(*parts: bytes) -> bytes:
    """SHA-256 over parts and their lengths: no two lists of parts give the same bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


@dataclass(frozen=True)
class Tail:
    """Where a chain ends. `watched` is the hash at the position that was asked for, if reached;
    `older` says which older accounting's its totals are, if they are not today's."""

    count: int
    hash: bytes
    watched: bytes | None
    older: str | None = None


def replay(
    rows: Iterable[Sequence[Any]],
    description: Description,
    accountant: Accountant,
    *,
    watch: int,
    seen: Callable[[Record, list[Event]], None] | None = None,
) -> Tail:
    """Checks every record, in order, and adds its events to `accountant`.

    Args:
        rows: of the database, by sequence.
        watch: number of records after which the hash is kept.
        seen: called with every record that was found intact.

    Raises:
        LedgerCorruptError: altered, missing or unknown records, or totals of no accounting.
    """
    count, last = 0, description.first_hash
    watched = last if watch == 0 else None
    older: str | None = None
    for row in rows:
        record = Record.of_row(row)
        record.check(description, count + 1, last)
        try:
            events = decode(record.events, record.charges, record.format_version)
            accountant.replay(events)
        except ValueError as error:
            raise LedgerCorruptError(f"record {count + 1} cannot be charged: {error}") from error
        found = compare(record.sequence, record.totals, accountant, record.format_version)
        older = found or older
        count, last = record.sequence, record.hash
        if count == watch:
            watched = last
        if seen is not None:
            seen(record, events)
    return Tail(count, last, watched, older)
