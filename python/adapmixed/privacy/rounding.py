"""Rounding in the safe direction: costs up, admissible settings down.

After each step that may round, a result moves outward by 4 ulp (`up`). A sum moves by 2^-50 times
the sum of the magnitudes of its terms (`sum_up`). Both exceed the error of IEEE arithmetic
together with a C library whose exp, expm1, log and log1p are within 2 ulp. Sums and multiples of
costs that are already rounded up need only one step to the next float (`add_up`, `times_up`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal

import numpy as np
from numpy.typing import NDArray

_SUM_SLACK = 2.0**-50


def up(value: float) -> float:
    """Return `value`, moved up by 4 ulp."""
    return value + 4 * math.ulp(value)


def sum_up(*terms: float) -> float:
    """Return the sum of terms with errors of a few ulp, moved up by 2^-50 of their magnitudes."""
    return math.fsum(terms) + _SUM_SLACK * math.fsum(map(abs, terms))


def softplus_up(value: float) -> float:
    """Return log(1 + e^value), rounded up."""
    if value <= 0:
        return up(math.log1p(up(math.exp(value))))
    return up(value + up(math.log1p(up(math.exp(-value)))))


def log_expm1_up(value: float) -> float:
    """Return log(e^value - 1) for value > 0, rounded up."""
    if value < 1:
        return sum_up(math.log(up(math.expm1(value))), _SUM_SLACK)
    return value if math.isinf(value) else up(value + math.log1p(-math.exp(-value)))


def lowered(guess: float, floor: float, admissible: Callable[[float], bool]) -> float:
    """Return the first admissible value of guess, guess (1 - 2^-52), guess (1 - 2^-51), ...

    The result is never below `floor`, which is admissible.
    """
    step = 2.0**-53
    value = guess
    while value > floor and not admissible(value):
        step *= 2
        value = guess * (1 - min(1.0, step))
    return max(value, floor)


def add_up(a: float, b: float) -> float:
    """Return a + b, rounded up; exact if one term is 0."""
    return a + b if 0 in (a, b) else math.nextafter(a + b, math.inf)


def times_up(count: float, cost: float) -> float:
    """Return count · cost, rounded up; 0 if either is 0, even for an infinite cost."""
    if cost == 0 or count == 0:
        return 0.0
    return cost if count == 1 else math.nextafter(count * cost, math.inf)


def array_add_up(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a + b, rounded up element by element; exact if one term is 0."""
    with np.errstate(over="ignore"):
        total = a + b
        above = np.nextafter(total, np.inf)
    return np.asarray(np.where((a == 0) | (b == 0), total, above), dtype=np.float64)


def four_digits(value: float, rounding: str) -> str:
    """Return `value` as text with four significant digits, near 1 of its distance from 1.

    Args:
        value: number to write.
        rounding: ROUND_FLOOR or ROUND_CEILING of the module decimal.
    """
    context = Context(prec=4, rounding=rounding)
    if 0 < abs(value - 1.0) < 0.01:
        near = 1 + context.create_decimal(Decimal(value) - 1)
        return f"{near:f}".rstrip("0")
    return f"{float(context.create_decimal(Decimal(value))):.4g}"
