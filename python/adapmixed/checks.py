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


def check_count(name: str, value: Any, minimum: int = 1) -> int:
    """Return `value` as an int that is at least `minimum`."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    return count


def check_optional_count(name: str, value: Any) -> int | None:
    """Return `value` as an int that is at least 1, or None."""
    return None if value is None else check_count(name, value)


def check_queries(name: str, value: Any, minimum: int = 1, log2_most: int = 63) -> int:
    """Return `value` as an int that is at least `minimum` and at most 2^`log2_most`."""
    count = check_count(name, value, minimum)
    if count > 2**log2_most:
        bits = count.bit_length()
        shown = str(count) if bits < 128 else f"about 2**{bits}"
        raise ValueError(f"{name} must be <= 2**{log2_most}, got {shown}")
    return count


def check_optional_queries(name: str, value: Any) -> int | None:
    """Return `value` as an int that is at least 1 and at most 2^63, or None."""
    return None if value is None else check_queries(name, value)


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


def check_real(name: str, value: Any, *, infinite: bool = False) -> float:
    """Return `value` as a float >= 0 that is not NaN, and finite unless `infinite`."""
    number = _as_float(name, value)
    if math.isnan(number) or number < 0 or (math.isinf(number) and not infinite):
        allowed = ">= 0" if infinite else "finite and >= 0"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number


def check_measure(measure: Any, order: Any) -> float | None:
    """Return the order of a unit of charges: > 1 for "renyi", None for "zcdp"."""
    check_option("measure", measure, MEASURES)
    if (order is None) != (measure == "zcdp"):
        raise ValueError(f"order must be given for 'renyi' and None for 'zcdp', got {order!r}")
    return None if order is None else check_order(order)


def check_largest(measure: str, largest: Any) -> float | None:
    """Return the largest charge > 0 of one answer as a float; None if it is not known."""
    if largest is None:
        return None
    if measure != "zcdp":
        raise ValueError(f"largest must be None for {measure!r}, got {largest!r}")
    if not (found := check_real("largest", largest)):
        raise ValueError(f"largest must be > 0, got {largest!r}")
    return found


def check_order(value: Any, name: str = "order") -> float:
    """Return `value` as a finite Rényi order > 1."""
    order = _as_float(name, value)
    if not order > 1:
        raise ValueError(f"{name} must be > 1, got {value!r}")
    if math.isinf(order):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return order


def check_epsilon(value: Any) -> float:
    """Return `value` as a finite ε > 0."""
    epsilon = check_real("epsilon", value)
    if epsilon == 0:
        raise ValueError(f"epsilon must be > 0, got {value!r}")
    return epsilon


def check_delta(value: Any) -> float:
    """Return `value` as a δ in (0, 1)."""
    delta = check_real("delta", value)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {value!r}")
    return delta


def check_rate(name: str, rate: Any) -> float:
    """Return `rate` as a float in [0, 1]."""
    number = check_real(name, rate)
    if number > 1:
        raise ValueError(f"{name} must be in [0, 1], got {rate!r}")
    return number


def check_neighbours(value: Any) -> str:
    """Return `value` if it is one of `NEIGHBOURS`."""
    check_option("adjacency", value, NEIGHBOURS)
    return str(value)


def check_question(value: Any) -> str:
    """Return `value` if it is one of `QUESTIONS`."""
    check_option("adjacency", value, QUESTIONS)
    return str(value)


def check_box(lower: Any, upper: Any) -> tuple[float, float]:
    """Return the box (lower, upper) of p̄_i/q as floats, 0 <= lower <= 1 <= upper."""
    low, high = check_real("lower (a ratio)", lower), check_real("upper (a ratio)", upper)
    if low > 1:
        raise ValueError(f"lower (a ratio) must be in [0, 1], got {lower!r}")
    if high < 1:
        raise ValueError(f"upper (a ratio) must be >= 1, got {upper!r}")
    return low, high


def check_clip(lower: Any, upper: Any) -> tuple[float, float]:
    """Return the clip range of log p_i/q as floats, lower <= 0 <= upper."""
    low, high = _as_float("lower", lower), _as_float("upper", upper)
    if not -math.inf < low <= 0:
        raise ValueError(f"lower (a log-ratio) must be finite and <= 0, got {lower!r}")
    return low, check_real("upper (a log-ratio)", high)


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, bool | str):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None


def check_rng(rng: Any) -> None:
    """Raise ValueError unless `rng` is a random source."""
    if not callable(getattr(rng, "reserve", None)):
        raise ValueError(f"rng must be SecureRandom() or SeededRandom(seed), got {rng!r}")
