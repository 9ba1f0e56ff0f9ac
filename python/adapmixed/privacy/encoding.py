"""Dataclasses and events as JSON text that gives back every bit.

Numbers keep the digits that give the same float64 again, infinity is the string "inf", and arrays
are base64 of little-endian float64. The declared type of a field decides how it is read.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from adapmixed.limits import check_count
from adapmixed.privacy.events import Event

T = TypeVar("T")

EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}
"""Classes of events by their names."""


def exactly(kind: type, value: Any) -> Any:
    """Return the value if it is of exactly this type, so that True is not an integer."""
    if type(value) is not kind:
        raise ValueError(f"must be {kind.__name__}, got {value!r}")
    return value


def written(value: Any) -> Any:
    """Return a dataclass, an accountant, an array, or a number or several as a JSON value."""
    if is_dataclass(value):
        return to_json(value)
    if hasattr(value, "state"):
        return value.state()
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value, dtype="<f8").tobytes()
        return {"shape": list(value.shape), "data": base64.b64encode(data).decode("ascii")}
    if isinstance(value, Mapping):
        return [[written(key), written(one)] for key, one in value.items()]
    if isinstance(value, tuple):
        return [written(one) for one in value]
    return "inf" if value == math.inf else value


def read_real(value: Any) -> float:
    """Return a float64 as `written`."""
    if value == "inf":
        return math.inf
    number: float = exactly(float, value)
    if not math.isfinite(number):
        raise ValueError(f"must be a float64, got {value!r}")
    return number


def read_array(found: Any) -> NDArray[np.float64]:
    """Return a float64 array as `written`."""
    check_keys("array", found, {"shape", "data"})
    shape = [exactly(int, length) for length in exactly(list, found["shape"])]
    data = base64.b64decode(exactly(str, found["data"]), validate=True)
    if min(shape, default=0) < 0 or len(data) != 8 * math.prod(shape):
        raise ValueError(f"must hold {shape} numbers, got {len(data)} bytes")
    return np.frombuffer(data, dtype="<f8").astype(np.float64).reshape(shape)


READERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: partial(exactly, kind) for kind in (int, str, bool)},
    "float": read_real,
    "tuple[float, ...]": lambda found: tuple(map(read_real, exactly(list, found))),
    "NDArray[np.float64]": read_array,
    "Mapping[Event, int]": lambda found: {
        read_event(event): check_count("queries", queries, 0) for event, queries in found
    },
}
"""How a field of a declared type is read. Other modules add their own."""


def _read(name: str, kind: str, found: Any) -> Any:
    if found is None and kind.endswith(" | None"):
        return None
    try:
        return READERS[kind.removesuffix(" | None")](found)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} {error}") from error


def to_json(value: Any) -> dict[str, Any]:
    """Return a dataclass as a JSON object. An event has its class name under "event"."""
    name = type(value).__name__
    head = {"event": name} if EVENTS.get(name) is type(value) else {}
    return head | {one.name: written(getattr(value, one.name)) for one in fields(value)}


def from_json(kind: type[T], found: Any) -> T:
    """Return the object of this class that `to_json` has written.

    Raises:
        ValueError: a field is missing, unknown, of another type, or not valid for the class.
    """
    known = {one.name: str(one.type) for one in fields(kind)}  # type: ignore[arg-type]
    check_keys(kind.__name__, found, known)
    return kind(**{name: _read(name, of, found[name]) for name, of in known.items()})


def read_event(found: Any) -> Event:
    """Return the event that `to_json` has written.

    Raises:
        ValueError: the event is unknown, so it cannot be charged, or a field is not valid.
    """
    given = dict(exactly(dict, found))
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


def check_keys(name: str, found: Any, keys: Mapping[str, Any] | set[str]) -> dict[str, Any]:
    """Return the object if it has these keys and no others; raise ValueError otherwise."""
    if type(found) is not dict or set(found) != set(keys):
        given = ", ".join(found) if isinstance(found, dict) else repr(found)
        raise ValueError(f"{name} must have {', '.join(keys)}, got {given}")
    return found
