"""Sums and multiples of costs, rounded up; settings as they are shown."""

from __future__ import annotations

import math
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray


def add_up(a: float, b: float) -> float:
    """a + b rounded up; exact where one term is 0."""
    return a + b if 0 in (a, b) else math.nextafter(a + b, math.inf)


def times_up(count: float, cost: float) -> float:
    """count · cost rounded up; 0 where either is 0, even for an infinite cost."""
    if cost == 0 or count == 0:
        return 0.0
    return cost if count == 1 else math.nextafter(count * cost, math.inf)


def array_add_up(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """a + b rounded up; exact where one term is 0."""
    with np.errstate(over="ignore"):
        total = a + b
    exact = (a == 0) | (b == 0)
    return np.asarray(np.where(exact, total, np.nextafter(total, np.inf)), dtype=np.float64)


def four_digits(value: float, rounding: str) -> str:
    """`value` to four significant digits; `rounding` is ROUND_FLOOR or ROUND_CEILING of decimal."""
    return f"{float(Context(prec=4, rounding=rounding).create_decimal(Decimal(value))):.4g}"
