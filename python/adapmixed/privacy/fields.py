"""Fields of records as text and bytes, exactly: what is read back equals what was written, in bits.

A record is a JSON object with one entry per field. The entries of arrays lie apart, in `Arrays`,
little-endian float64 in the order of the fields; the object holds their shape. Numbers are written
with the digits that give the same float64 again, infinity as the string "inf". The ledger's events
and the states of accountants and filters are written this way.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np


@dataclass
class Arrays:
    """The arrays of a record: filled while it is written, emptied while it is read."""

    data: bytearray = field(default_factory=bytearray)
    position: int = 0


@dataclass(frozen=True)
class Kind:
    """How one field is written and read; `read` raises ValueError or TypeError."""

    write: Callable[[Any, Arrays], Any]
    read: Callable[[Any, Arrays], Any]


def exactly(kind: type, value: Any) -> Any:
    """The value, of this type and no other (True is no integer), else TypeError."""
    if type(value) is not kind:
        raise TypeError(f"must be {kind.__name__}, got {value!r}")
    return value


def _plain(kind: type) -> Kind:
    return Kind(lambda value, _: exactly(kind, value), lambda value, _: exactly(kind, value))


def write_real(value: float) -> float | str:
    """A float64 as JSON: +inf as "inf"."""
    return "inf" if value == math.inf else exactly(float, value)


def read_real(value: Any) -> float:
    """The float64 of `write_real`; ValueError or TypeError for anything else."""
    if value == "inf":
        return math.inf
    number: float = exactly(float, value)
    if not math.isfinite(number):
        raise ValueError(f"must be a float64, got {value!r}")
    return number


def _write_array(value: Any, arrays: Arrays) -> list[int]:
    arrays.data += np.ascontiguousarray(value, dtype="<f8").tobytes()
    return list(value.shape)


def _read_array(shape: Any, arrays: Arrays) -> Any:
    if type(shape) is not list or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"must be a shape, got {shape!r}")
    end = arrays.position + 8 * math.prod(shape)
    if end > len(arrays.data):
        raise ValueError(f"needs {end} bytes of charges, there are {len(arrays.data)}")
    entries = np.frombuffer(bytes(arrays.data[arrays.position : end]), dtype="<f8")
    arrays.position = end
    return entries.astype(np.float64).reshape(shape)


def optional(kind: Kind) -> Kind:
    """None, or a value of that kind."""
    return Kind(
        lambda value, arrays: None if value is None else kind.write(value, arrays),
        lambda value, arrays: None if value is None else kind.read(value, arrays),
    )


COUNT = _plain(int)
WORD = _plain(str)
FLAG = _plain(bool)
REAL = Kind(lambda value, _: write_real(value), lambda value, _: read_real(value))
REALS = Kind(
    lambda value, _: [write_real(number) for number in value],
    lambda value, _: tuple(read_real(number) for number in exactly(list, value)),
)
ARRAY = Kind(_write_array, _read_array)


def write_fields(
    name: str, fields: Mapping[str, Kind], values: Mapping[str, Any], arrays: Arrays
) -> dict[str, Any]:
    """The fields of an object, by name; ValueError for one of another type than is said there."""
    written = {}
    for key, kind in fields.items():
        try:
            written[key] = kind.write(values[key], arrays)
        except TypeError as error:
            raise ValueError(f"{name}.{key} {error}") from error
    return written


def read_fields(
    name: str, fields: Mapping[str, Kind], written: Mapping[str, Any], arrays: Arrays
) -> dict[str, Any]:
    """The values of `write_fields`; ValueError that begins with `name` where they are not."""
    if set(written) != set(fields):
        raise ValueError(
            f"{name} must have the fields {', '.join(fields)}, got {', '.join(written)}"
        )
    values = {}
    for key, kind in fields.items():
        try:
            values[key] = kind.read(written[key], arrays)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}.{key} {error}") from error
    return values


def record(kind: type, fields: Mapping[str, Kind]) -> Kind:
    """An object of a dataclass that is made from these fields."""

    def write(value: Any, arrays: Arrays) -> Any:
        return write_fields(kind.__name__, fields, vars(value), arrays)

    def read(written: Any, arrays: Arrays) -> Any:
        values = read_fields(kind.__name__, fields, exactly(dict, written), arrays)
        return kind(**values)

    return Kind(write, read)


def write_state(
    name: str, version: int, fields: Mapping[str, Kind], values: Mapping[str, Any]
) -> dict[str, Any]:
    """A record with its format version and its arrays, in base64: strict JSON values."""
    arrays = Arrays()
    written = write_fields(name, fields, values, arrays)
    encoded = base64.b64encode(bytes(arrays.data)).decode("ascii")
    return {"format_version": version, **written, "arrays": encoded}


def read_state(
    name: str, version: int, fields: Mapping[str, Kind], state: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of `write_state`; ValueError that begins with `name` where they are not."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{name} must be a state, got {type(state).__name__}")
    found = state.get("format_version")
    if type(found) is not int or found != version:
        raise ValueError(f"{name}.format_version must be {version}, got {found!r}")
    rest = {key: value for key, value in state.items() if key not in ("format_version", "arrays")}
    try:
        data = base64.b64decode(exactly(str, state.get("arrays")), validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}.arrays {error}") from error
    arrays = Arrays(bytearray(data))
    values = read_fields(name, fields, rest, arrays)
    if arrays.position != len(arrays.data):
        raise ValueError(f"{name}.arrays must hold {arrays.position} bytes, got {len(arrays.data)}")
    return values


def canonical(value: Any) -> str:
    """JSON without spaces, ASCII only, NaN refused."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def parse(text: str) -> Any:
    """The value of a JSON text without NaN and infinities, else ValueError."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of the format")
