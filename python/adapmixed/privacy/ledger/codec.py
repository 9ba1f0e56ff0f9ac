"""Privacy events as text and bytes, exactly: what is read back equals what was written, in bits.

An event is a record of its fields (`privacy.fields`) with its class name under "event". The arrays
of all events lie in one blob, in their order, compressed by zlib.

An unknown name or field is refused, since an event that is not understood cannot be charged.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import Any

from adapmixed.privacy.event_fields import FIELDS, VERSION, fields_of
from adapmixed.privacy.events import Event
from adapmixed.privacy.fields import (
    ARRAY,
    Arrays,
    canonical,
    exactly,
    parse,
    read_fields,
    write_fields,
    write_real,
)
from adapmixed.privacy.ledger.errors import LedgerCorruptError

__all__ = ["FIELDS", "decode", "encode", "readable"]

_CLASSES = {kind.__name__: kind for kind in FIELDS}


def encode(events: Iterable[Event], version: int = VERSION) -> tuple[str, bytes]:
    """Events as (JSON text, compressed arrays).

    Raises:
        ValueError: an event that is not in `FIELDS`, a field of another type than is said there, or
            one that this version of the fields lacks and that is not at its default.
    """
    arrays, objects = Arrays(), []
    for event in events:
        if type(event) not in FIELDS:
            raise ValueError(
                f"events must be of a class that the ledger knows ({', '.join(_CLASSES)}), got "
                f"{type(event).__name__}"
            )
        fields = fields_of(type(event), version)
        for name in FIELDS[type(event)].keys() - fields.keys():
            if getattr(event, name) != getattr(type(event), name):
                raise ValueError(
                    f"{name} must be {getattr(type(event), name)!r} in a ledger of format "
                    f"{version}, which cannot say otherwise, got {getattr(event, name)!r}: begin a "
                    "new ledger"
                )
        written = write_fields(type(event).__name__, fields, vars(event), arrays)
        objects.append({"event": type(event).__name__, **written})
    return canonical(objects), zlib.compress(bytes(arrays.data))


def decode(text: str, blob: bytes, version: int = VERSION) -> list[Event]:
    """The events of :func:`encode`, of the same version.

    Raises:
        LedgerCorruptError: unknown event or field, wrong type, missing or surplus charges.
    """
    try:
        objects = parse(text)
        arrays = Arrays(bytearray(_decompress(blob, _expected(objects))))
        events = [_event(written, arrays, version) for written in objects]
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        raise LedgerCorruptError(f"events could not be read: {error}") from error
    if arrays.position != len(arrays.data):
        raise LedgerCorruptError(
            f"charges must hold {arrays.position} bytes, there are {len(arrays.data)}"
        )
    return events


def _decompress(blob: bytes, expected: int) -> bytes:
    stream = zlib.decompressobj()
    data = stream.decompress(blob, expected + 1)  # never unpacks more than the events ask for
    if not stream.eof or stream.unused_data:
        raise ValueError(f"charges must unpack to {expected} bytes and nothing else")
    return data


def _expected(objects: Any) -> int:
    """Bytes of the arrays whose shapes the objects hold."""
    total = 0
    for written in exactly(list, objects):
        fields = FIELDS.get(_class_of(written), {})
        for name, kind in fields.items():
            if kind is ARRAY:
                shape = exactly(list, written.get(name))
                total += 8 * math.prod(max(0, exactly(int, n)) for n in shape)
    if total > 1 << 40:
        raise ValueError(f"charges of {total} bytes cannot belong to one record")
    return total


def _class_of(written: Any) -> type:
    name = exactly(dict, written).get("event")
    if type(name) is not str or name not in _CLASSES:
        raise ValueError(
            f"event must be one that this version knows ({', '.join(_CLASSES)}), got {name!r}"
        )
    return _CLASSES[name]


def _event(written: Any, arrays: Arrays, version: int) -> Event:
    kind = _class_of(written)
    fields = {name: value for name, value in written.items() if name != "event"}
    known = fields_of(kind, version)
    event: Event = kind(**read_fields(kind.__name__, known, fields, arrays))
    return event


def readable(event: Event) -> dict[str, Any]:
    """An event as JSON with the entries of its arrays in place of their shape."""
    written: dict[str, Any] = {"event": type(event).__name__}
    for name, kind in FIELDS[type(event)].items():
        value = getattr(event, name)
        written[name] = _nested(value.tolist()) if kind is ARRAY else kind.write(value, Arrays())
    return written


def _nested(value: Any) -> Any:
    return [_nested(entry) for entry in value] if type(value) is list else write_real(value)
