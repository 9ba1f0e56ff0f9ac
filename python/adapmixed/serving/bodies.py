"""Read a request's JSON body strictly."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from adapmixed.serving.errors import RequestError, bad_request, shortened

MAX_BODY = 1 << 20
"""Largest body of a request, in bytes."""


def parsed(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body holds.

    Raises:
        RequestError: 400: it is not an object in UTF-8, a key occurs twice, it is nested too
            deeply, or it holds NaN or an infinity.
    """
    try:
        found = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except RequestError:
        raise
    except RecursionError:
        raise bad_request(None, "the body must not be nested so deeply") from None
    except ValueError:  # also of UTF-8, and of integers with thousands of digits
        raise bad_request(None, "the body must be one JSON object in UTF-8") from None
    if not isinstance(found, dict):
        raise bad_request(None, "the body must be one JSON object in UTF-8")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise bad_request(name[:60], f"the field {shortened(name)} must be given once")
        found[name] = value
    return found


def _no_constant(text: str) -> NoReturn:
    raise bad_request(None, f"the body must be JSON, which has no {text}")


def text_of(param: str, value: Any) -> str:
    """Return a value as a string of Unicode characters.

    Raises:
        RequestError: 400: it is no string, or it holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise bad_request(param, f"{param} must be a string, got {shortened(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise bad_request(param, f"{param} must not hold half of a surrogate pair") from None
    return value


def whole_of(param: str, value: Any) -> int:
    """Return a value as an integer ≥ 1. true is no integer.

    Raises:
        RequestError: 400: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise bad_request(param, f"{param} must be an integer >= 1, got {shortened(value)}")
    return value


def flag_of(param: str, value: Any) -> bool:
    """Return a value as a bool; null is false.

    Raises:
        RequestError: 400: it is neither true, false nor null.
    """
    if value is not None and not isinstance(value, bool):
        raise bad_request(param, f"{param} must be true or false, got {shortened(value)}")
    return bool(value)
