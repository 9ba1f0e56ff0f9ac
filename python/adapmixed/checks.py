"""Checks of arguments, shared by the whole package.

Each returns the value in its plain type, or raises a ValueError that names the argument, its value
and what is allowed.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

NEIGHBOURS = ("add_remove", "zero_out")
"""Neighbours of realised losses: a member is left out of the mean, or its shard is emptied."""

QUESTIONS = ("zero_out", "replace_one")
"""Neighbours of an accountant's statement: a shard is emptied, or its records change."""

MEASURES = ("renyi", "zcdp")
"""Units of individual charges: D↔_order at one Rényi order, or ρ of zCDP."""


def check_count(name: str, value: Any, minimum: int = 1, most: int | None = None) -> int:
    """Return `value` as an int that is at least `minimum`, and at most `most`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    if most is not None and count > most:
        raise ValueError(f"{name} must be <= {most}, got {value!r}")
    return count


def check_optional_count(name: str, value: Any) -> int | None:
    """Return `value` as an int that is at least 1, or None."""
    return None if value is None else check_count(name, value)


def check_flag(name: str, value: Any) -> bool:
    """Return `value` if it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_type(name: str, value: object, kind: type, words: str, *, optional: bool = False) -> None:
    """Raise unless `value` is of this type, or None if that is allowed."""
    if not (optional and value is None) and not isinstance(value, kind):
        raise ValueError(f"{name} must be {words}, got {value!r}")


def check_option(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise unless `value` is one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)!r}, got {value!r}")


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    infinite: bool = False,
) -> float:
    """Return `value` as a float that is > above, >= least and <= most.

    Args:
        name: name of the argument, for messages.
        value: number to check.
        above: exclusive lower bound.
        least: inclusive lower bound.
        most: inclusive upper bound.
        infinite: True if +inf is allowed. NaN never is.

    Raises:
        ValueError: the value is not such a number.
    """
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


def check_measure(measure: Any, order: Any) -> float | None:
    """Return the order of a unit of charges: > 1 for "renyi", None for "zcdp"."""
    check_option("measure", measure, MEASURES)
    if (order is None) != (measure == "zcdp"):
        raise ValueError(f"order must be given for 'renyi' and None for 'zcdp', got {order!r}")
    return None if order is None else check_number("order", order, above=1.0)


def check_largest(measure: str, largest: Any) -> float | None:
    """Return the largest charge > 0 of one answer as a float; None if it is not known."""
    if largest is None:
        return None
    if measure != "zcdp":
        raise ValueError(f"largest must be None for {measure!r}, got {largest!r}")
    return check_number("largest", largest, above=0.0)


def check_epsilon(value: Any) -> float:
    """Return `value` as a finite ε > 0."""
    return check_number("epsilon", value, above=0.0)


def check_rate(name: str, rate: Any) -> float:
    """Return `rate` as a float in [0, 1]."""
    return check_number(name, rate, least=0.0, most=1.0)


def check_neighbours(value: Any) -> str:
    """Return `value` if it is one of `NEIGHBOURS`."""
    check_option("adjacency", value, NEIGHBOURS)
    return str(value)


def check_question(value: Any) -> str:
    """Return `value` if it is one of `QUESTIONS`."""
    check_option("adjacency", value, QUESTIONS)
    return str(value)


def check_rng(rng: Any) -> None:
    """Raise ValueError unless `rng` is a random source."""
    if not callable(getattr(rng, "reserve", None)):
        raise ValueError(f"rng must be SecureRandom() or SeededRandom(seed), got {rng!r}")
