"""Dataclasses and events as JSON text that gives back every bit.

The type of a field decides how its value is written. Numbers keep the digits that give the same
float64 again, infinity is the string "inf", and arrays are base64 of little-endian float64.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.events import Event

T = TypeVar("T")

EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
"""Classes of events by their names."""


def exactly(kind: type, value: Any) -> Any:
    """Return the value if it is of exactly this type, so that True is not an integer."""
    if type(value) is not kind:
        raise ValueError(f"must be {kind.__name__}, got {value!r}")
    return value


def write_real(value: float) -> float | str:
    """Return a float64 as a JSON value; +inf becomes "inf"."""
    return "inf" if value == math.inf else exactly(float, value)


def read_real(value: Any) -> float:
    """Return the float64 that `write_real` has written."""
    if value == "inf":
        return math.inf
    number: float = exactly(float, value)
    if not math.isfinite(number):
        raise ValueError(f"must be a float64, got {value!r}")
    return number


def write_array(value: NDArray[np.float64]) -> dict[str, Any]:
    """Return a float64 array as a JSON object with its shape and its bytes in base64."""
    data = np.ascontiguousarray(value, dtype="<f8").tobytes()
    return {"shape": list(value.shape), "data": base64.b64encode(data).decode("ascii")}


def read_array(written: Any) -> NDArray[np.float64]:
    """Return the float64 array that `write_array` has written."""
    check_keys("array", written, {"shape", "data"})
    shape = [exactly(int, length) for length in exactly(list, written["shape"])]
    data = base64.b64decode(exactly(str, written["data"]), validate=True)
    if min(shape, default=0) < 0 or len(data) != 8 * math.prod(shape):
        raise ValueError(f"must hold {shape} numbers, got {len(data)} bytes")
    return np.frombuffer(data, dtype="<f8").astype(np.float64).reshape(shape)


CODECS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    **{
        kind.__name__: (partial(exactly, kind), partial(exactly, kind)) for kind in (int, str, bool)
    },
    "float": (write_real, read_real),
    "tuple[float, ...]": (
        lambda value: [write_real(number) for number in value],
        lambda written: tuple(read_real(number) for number in exactly(list, written)),
    ),
    "NDArray[np.float64]": (write_array, read_array),
}
"""How fields of a declared type are written, and read. `account` adds its own."""


def _converted(name: str, kind: str, value: Any, *, read: bool) -> Any:
    """Return a field's value as it is written, or read from a file."""
    if value is None and kind.endswith(" | None"):
        return None
    try:
        return CODECS[kind.removesuffix(" | None")][read](value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {error}") from error


def to_json(value: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object, each field by its declared type.

    An event has its class name under "event".
    """
    name = type(value).__name__
    head = {"event": name} if EVENTS.get(name) is type(value) else {}
    return head | {
        one.name: _converted(one.name, str(one.type), getattr(value, one.name), read=False)
        for one in fields(value)
    }


def from_json(kind: type[T], written: Any) -> T:
    """Return the object of this class that `to_json` has written.

    Raises:
        ValueError: a field is missing, unknown, of another type, or not valid for the class.
    """
    known = {one.name: str(one.type) for one in fields(kind)}  # type: ignore[arg-type]
    check_keys(kind.__name__, written, known)
    return kind(
        **{name: _converted(name, of, written[name], read=True) for name, of in known.items()}
    )


def read_event(written: Any) -> Event:
    """Return the event that `to_json` has written.

    Raises:
        ValueError: the event is unknown, so it cannot be charged, or a field is not valid.
    """
    given = dict(exactly(dict, written))
    name = given.pop("event", None)
    if type(name) is not str or name not in EVENTS:
        raise ValueError(f"event must be one of {', '.join(EVENTS)}, got {name!r}")
    event: Event = from_json(EVENTS[name], given)
    return event


def canonical(value: Any) -> str:
    """Return JSON text without spaces, in ASCII; raise ValueError for NaN and infinities."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def parse(text: str) -> Any:
    """Return the value of a JSON text; raise ValueError for NaN and infinities."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"numbers must be finite, got {name}")


def check_keys(name: str, written: Any, keys: Mapping[str, Any] | set[str]) -> dict[str, Any]:
    """Return the object if it has these keys and no others; raise ValueError otherwise."""
    if type(written) is not dict or set(written) != set(keys):
        found = ", ".join(written) if isinstance(written, dict) else repr(written)
        raise ValueError(f"{name} must have {', '.join(keys)}, got {found}")
    return written
