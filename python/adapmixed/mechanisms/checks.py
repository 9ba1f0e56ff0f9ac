"""Checks of a mechanism's settings: refusals name the field, its value and the rule."""

import math
import numbers
from collections.abc import Sequence


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    infinite: bool = False,
) -> float:
    """A real number > above, >= least, <= most; finite unless ``infinite``; never NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        value = float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a number that a float64 can hold, got {value}") from None
    if not value > above and above > -math.inf:
        raise ValueError(f"{name} must be > {above:g}, got {value}")
    if not value >= least:
        raise ValueError(f"{name} must be >= {least:g}, got {value}")
    if not value <= most:
        raise ValueError(f"{name} must be <= {most:g}, got {value}")
    if math.isinf(value) and not infinite:
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def check_count(name: str, value: object, *, optional: bool = False) -> None:
    """An integer >= 1, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """One of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)!r}, got {value!r}")
