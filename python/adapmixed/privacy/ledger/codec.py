"""Privacy events as text and bytes, exactly: what is read back equals what was written, in bits.

An event is a JSON object with its class name under "event" and one entry per field. The entries of
an array lie in a separate blob, in the order of the events, little-endian float64, compressed by
zlib; the object holds their shape. Numbers are written with the digits that give the same float64
again, infinities as the string "inf".

A new event needs one line in `FIELDS`, in the order of its dataclass; its name and fields then
belong to the format. An unknown name or field is refused, since an event that is not understood
cannot be charged.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from adapmixed.privacy.events import (
    BoundedRangeAnswer,
    Caveat,
    ClippedAnswer,
    Event,
    GaussianScreening,
    IndividualCharge,
    LeaveOneOutLoss,
    PublicAnswer,
    RenyiBound,
    UnprotectedAnswer,
)
from adapmixed.privacy.ledger.errors import LedgerCorruptError


@dataclass
class _Arrays:
    """The blob of one record: filled while events are written, emptied while they are read."""

    data: bytearray = field(default_factory=bytearray)
    position: int = 0


@dataclass(frozen=True)
class _Kind:
    """How one field is written and read; `read` raises ValueError or TypeError."""

    write: Callable[[Any, _Arrays], Any]
    read: Callable[[Any, _Arrays], Any]


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"must be {kind.__name__}, got {value!r}")
    return value


def _plain(kind: type) -> _Kind:
    return _Kind(lambda value, _: _exactly(kind, value), lambda value, _: _exactly(kind, value))


def write_real(value: float) -> float | str:
    """A float64 as JSON: +inf as "inf"."""
    return "inf" if value == math.inf else _exactly(float, value)


def _read_real(value: Any) -> float:
    if value == "inf":
        return math.inf
    number: float = _exactly(float, value)
    if not math.isfinite(number):
        raise ValueError(f"must be a float64, got {value!r}")
    return number


def _write_array(value: Any, arrays: _Arrays) -> list[int]:
    arrays.data += np.ascontiguousarray(value, dtype="<f8").tobytes()
    return list(value.shape)


def _read_array(shape: Any, arrays: _Arrays) -> Any:
    if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"must be a shape, got {shape!r}")
    end = arrays.position + 8 * math.prod(shape)
    if end > len(arrays.data):
        raise ValueError(f"needs {end} bytes of charges, there are {len(arrays.data)}")
    entries = np.frombuffer(bytes(arrays.data[arrays.position : end]), dtype="<f8")
    arrays.position = end
    return entries.astype(np.float64).reshape(shape)


def _optional(kind: _Kind) -> _Kind:
    return _Kind(
        lambda value, arrays: None if value is None else kind.write(value, arrays),
        lambda value, arrays: None if value is None else kind.read(value, arrays),
    )


COUNT = _plain(int)
WORD = _plain(str)
FLAG = _plain(bool)
REAL = _Kind(lambda value, _: write_real(value), lambda value, _: _read_real(value))
REALS = _Kind(
    lambda value, _: [write_real(number) for number in value],
    lambda value, _: tuple(_read_real(number) for number in _exactly(list, value)),
)
ARRAY = _Kind(_write_array, _read_array)

FIELDS: dict[type, dict[str, _Kind]] = {
    GaussianScreening: {"num_models": COUNT, "queries": COUNT, "weight": REAL, "sigma": REAL},
    LeaveOneOutLoss: {"orders": REALS, "loss": ARRAY, "adjacency": WORD, "loss_error": REAL},
    RenyiBound: {
        "order": REAL,
        "epsilon": REAL,
        "num_models": COUNT,
        "queries": COUNT,
        "adjacency": WORD,
        "published": FLAG,
        "budget": _optional(COUNT),
    },
    ClippedAnswer: {
        "lower": REAL,
        "upper": REAL,
        "num_models": COUNT,
        "queries": COUNT,
        "budget": _optional(COUNT),
    },
    BoundedRangeAnswer: {
        "scale": REAL,
        "lower": REAL,
        "upper": REAL,
        "num_models": COUNT,
        "queries": COUNT,
        "budget": _optional(COUNT),
    },
    IndividualCharge: {"measure": WORD, "order": _optional(REAL), "charge": ARRAY},
    PublicAnswer: {"queries": COUNT},
    UnprotectedAnswer: {"queries": COUNT},
    Caveat: {"name": WORD},
}
"""Every event that a ledger can hold, with its fields."""

_CLASSES = {kind.__name__: kind for kind in FIELDS}


def canonical(value: Any) -> str:
    """JSON without spaces, ASCII only, NaN refused."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def parse(text: str) -> Any:
    """The value of a JSON text without NaN and infinities, else ValueError."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of the format")


def encode(events: Iterable[Event]) -> tuple[str, bytes]:
    """Events as (JSON text, compressed arrays).

    Raises:
        ValueError: an event that is not in `FIELDS`, or a field of another type than is said there.
    """
    arrays, objects = _Arrays(), []
    for event in events:
        fields = FIELDS.get(type(event))
        if fields is None:
            raise ValueError(
                f"events must be of a class that the ledger knows ({', '.join(_CLASSES)}), got "
                f"{type(event).__name__}"
            )
        written: dict[str, Any] = {"event": type(event).__name__}
        for name, kind in fields.items():
            try:
                written[name] = kind.write(getattr(event, name), arrays)
            except TypeError as error:
                raise ValueError(f"{type(event).__name__}.{name} {error}") from error
        objects.append(written)
    return canonical(objects), zlib.compress(bytes(arrays.data))


def decode(text: str, blob: bytes) -> list[Event]:
    """The events of :func:`encode`.

    Raises:
        LedgerCorruptError: unknown event or field, wrong type, missing or surplus charges.
    """
    try:
        objects = parse(text)
        arrays = _Arrays(bytearray(_decompress(blob, _expected(objects))))
        events = [_event(written, arrays) for written in objects]
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
    for written in _exactly(list, objects):
        fields = FIELDS.get(_class_of(written), {})
        for name, kind in fields.items():
            if kind is ARRAY:
                shape = _exactly(list, written.get(name))
                total += 8 * math.prod(max(0, _exactly(int, n)) for n in shape)
    if total > 1 << 40:
        raise ValueError(f"charges of {total} bytes cannot belong to one record")
    return total


def _class_of(written: Any) -> type:
    name = _exactly(dict, written).get("event")
    if type(name) is not str or name not in _CLASSES:
        raise ValueError(
            f"event must be one that this version knows ({', '.join(_CLASSES)}), got {name!r}"
        )
    return _CLASSES[name]


def _event(written: Any, arrays: _Arrays) -> Event:
    kind = _class_of(written)
    fields = FIELDS[kind]
    if set(written) != {"event", *fields}:
        raise ValueError(
            f"{kind.__name__} must have the fields {', '.join(fields)}, got {', '.join(written)}"
        )
    values = {}
    for name, how in fields.items():
        try:
            values[name] = how.read(written[name], arrays)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{kind.__name__}.{name} {error}") from error
    event: Event = kind(**values)
    return event


def readable(event: Event) -> dict[str, Any]:
    """An event as JSON with the entries of its arrays in place of their shape."""
    written: dict[str, Any] = {"event": type(event).__name__}
    for name, kind in FIELDS[type(event)].items():
        value = getattr(event, name)
        written[name] = _nested(value.tolist()) if kind is ARRAY else kind.write(value, _Arrays())
    return written


def _nested(value: Any) -> Any:
    return [_nested(entry) for entry in value] if type(value) is list else write_real(value)
