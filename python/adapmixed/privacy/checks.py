"""Checks of arguments, shared by events, conversions and planning.

Each returns the value in its plain type or raises a ValueError that names the argument, its value
and what is allowed.
"""

from __future__ import annotations

import math
import operator
from typing import Any

ADJACENCIES = ("add_remove", "zero_out")
"""Neighbouring ensembles: one member's model removed, or its slot answering the public model."""

QUESTIONS = (*ADJACENCIES, "replace_one")
"""What fixed guarantees can be asked for: also any change of the records inside one shard."""


def check_count(name: str, value: Any, minimum: int) -> int:
    """`value` as an int that is at least `minimum`, else ValueError."""
    try:
        count = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or count < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
    return count


def check_flag(name: str, value: Any) -> bool:
    """`value` if it is True or False, else ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_real(name: str, value: Any, *, infinite: bool = False) -> float:
    """`value` as a float >= 0 that is not NaN (and finite unless `infinite`), else ValueError."""
    number = _as_float(name, value)
    if math.isnan(number) or number < 0 or (math.isinf(number) and not infinite):
        allowed = ">= 0" if infinite else "finite and >= 0"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return number


MEASURES = ("renyi", "zcdp")
"""What individual charges are: D↔_order of one Rényi order, or ρ of zCDP."""


def check_measure(measure: Any, order: Any) -> float | None:
    """The order of a measure: > 1 for "renyi", None for "zcdp"; else ValueError."""
    if measure not in MEASURES:
        raise ValueError(f"measure must be one of {MEASURES}, got {measure!r}")
    if (order is None) != (measure == "zcdp"):
        raise ValueError(f"order must be given for 'renyi' alone, got {order!r}")
    return None if order is None else check_order(order)


def check_order(value: Any, name: str = "order") -> float:
    """`value` as a finite Rényi order > 1, else ValueError."""
    order = _as_float(name, value)
    if not order > 1:
        raise ValueError(f"{name} must be > 1, got {value!r}")
    if math.isinf(order):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return order


def check_epsilon(value: Any) -> float:
    """`value` as a finite ε > 0 to be kept to, else ValueError."""
    epsilon = check_real("epsilon", value)
    if epsilon == 0:
        raise ValueError(f"epsilon must be > 0, got {value!r}")
    return epsilon


def check_delta(value: Any) -> float:
    """`value` as a δ in (0, 1), else ValueError."""
    delta = check_real("delta", value)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {value!r}")
    return delta


def check_rate(name: str, rate: Any) -> float:
    """`rate` as a float in [0, 1], else ValueError."""
    number = check_real(name, rate)
    if number > 1:
        raise ValueError(f"{name} must be in [0, 1], got {rate!r}")
    return number


def check_adjacency(value: Any) -> str:
    """`value` if it is one of `ADJACENCIES`, else ValueError."""
    if value not in ADJACENCIES:
        raise ValueError(f"adjacency must be one of {ADJACENCIES}, got {value!r}")
    return str(value)


def check_question(value: Any) -> str:
    """`value` if it is one of `QUESTIONS`, else ValueError."""
    if value not in QUESTIONS:
        raise ValueError(f"adjacency must be one of {QUESTIONS}, got {value!r}")
    return str(value)


def check_box(lower: Any, upper: Any) -> tuple[float, float]:
    """The box (lower, upper) of p̄_i/q as floats, 0 <= lower <= 1 <= upper, else ValueError."""
    low, high = check_real("lower", lower), check_real("upper", upper)
    if low > 1:
        raise ValueError(f"lower must be in [0, 1], got {lower!r}")
    if high < 1:
        raise ValueError(f"upper must be >= 1, got {upper!r}")
    return low, high


def check_clip(lower: Any, upper: Any) -> tuple[float, float]:
    """The clip range of log p_i/q as floats, lower <= 0 <= upper, else ValueError."""
    low, high = _as_float("lower", lower), _as_float("upper", upper)
    if not -math.inf < low <= 0:
        raise ValueError(f"lower must be finite and <= 0, got {lower!r}")
    return low, check_real("upper", high)


def _as_float(name: str, value: Any) -> float:
    if isinstance(value, bool | str):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
