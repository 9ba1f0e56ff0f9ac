"""The discrete Gaussian, drawn exactly: the noise of counts.

Integers alone decide, so that the law is that of the theorem at every σ and at every distance: no
tail is cut off, and what is added to a count shifts it without rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from adapmixed.privacy.checks import check_real

Bits = Callable[[int], int]
"""A number in [0, 2^n) from n fair, independent bits."""


def discrete_gaussian(sigma: float, bits: Bits) -> int:
    """An integer z with probability in proportion to e^{−z²/(2σ²)}.

    Added to an integer that one shard changes by at most 1 it costs D_α ≤ α/(2σ²) at every order α,
    as N(0, σ²) does added to a real number: Canonne, Kamath and Steinke 2020, Theorem 4; drawn by
    their Algorithms 1 to 3 (docs/privacy.md, section 13, "Who has spent what").

    Args:
        sigma: > 0, a float, of which the square is taken exactly.
        bits: where the randomness comes from.

    Raises:
        ValueError: sigma is not finite and > 0.
    """
    exact = Fraction(check_real("sigma", sigma))
    if exact == 0:
        raise ValueError("sigma must be > 0, got 0.0")
    variance, scale = exact**2, math.floor(exact) + 1
    while True:
        drawn = _discrete_laplace(scale, bits)
        away = (abs(drawn) - variance / scale) ** 2 / (2 * variance)
        if _is_exp(away, bits):
            return drawn


def _discrete_laplace(scale: int, bits: Bits) -> int:
    """z with probability in proportion to e^{−|z|/scale}."""
    while True:
        rest = _below(scale, bits)
        if not _is_exp(Fraction(rest, scale), bits):
            continue
        whole = 0
        while _is_exp(Fraction(1), bits):
            whole += 1
        size, negative = rest + scale * whole, bool(bits(1))
        if size or not negative:  # 0 has one sign
            return -size if negative else size


def _is_exp(exponent: Fraction, bits: Bits) -> bool:
    """True with probability e^{−exponent}, exponent ≥ 0."""
    while exponent > 1:
        if not _is_exp(Fraction(1), bits):
            return False
        exponent -= 1
    count = 1
    while _below(exponent.denominator * count, bits) < exponent.numerator:
        count += 1
    return count % 2 == 1


def _below(end: int, bits: Bits) -> int:
    """An integer of [0, end), all alike."""
    length = (end - 1).bit_length()
    while (drawn := bits(length)) >= end:
        pass
    return drawn
