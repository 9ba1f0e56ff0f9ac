"""A ledger as JSON lines: one that describes it, then one per charge, numbers in full."""

from __future__ import annotations

from collections.abc import Iterable

from adapmixed.privacy.events import Event
from adapmixed.privacy.fields import canonical, parse
from adapmixed.privacy.ledger.codec import readable
from adapmixed.privacy.ledger.records import Description, Record


def description_line(description: Description) -> str:
    """The first line."""
    return canonical({"ledger": parse(description.text)})


def record_line(record: Record, events: Iterable[Event]) -> str:
    """One charge; +inf is the string "inf", as in the records."""
    return canonical(
        {
            "sequence": record.sequence,
            "format_version": record.format_version,
            "configuration": record.configuration.hex(),
            "events": [readable(event) for event in events],
            "totals": parse(record.totals),
            "hash": record.hash.hex(),
        }
    )
