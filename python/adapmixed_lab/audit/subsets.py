"""The weight of each member in an answer of a hidden random subset."""

from __future__ import annotations

import math

from adapmixed.limits import check_count, check_rate
from adapmixed.privacy.rounding import up


def amplification_rate(sample_rate: float, num_models: int, divide_by: str) -> float:
    """Return g in [0, 1] such that a hidden Poisson subset weighs each member by g/N.

    The subset S holds each member with probability s, the `sample_rate`. With "slots" the answer is
    (1/N)[Σ_{i∈S} p̄_i + (N-|S|) q], so g = s. With "subset" it is Σ_{i∈S} p̄_i / |S|, or q if S is
    empty, so g = 1 - (1-s)^N, rounded up: dividing by |S| undoes the subsampling. Proof:
    docs/theory/pmixed.md.
    """
    rate = check_rate("sample_rate", sample_rate)
    num_models = check_count("num_models", num_models)
    if divide_by == "slots":
        return rate
    if divide_by != "subset":
        raise ValueError(f"divide_by must be 'slots' or 'subset', got {divide_by!r}")
    if rate in (0.0, 1.0):
        return rate
    return min(1.0, up(-math.expm1(_up_magnitude(num_models * math.log1p(-rate)))))


def _up_magnitude(value: float) -> float:
    """Return `value` moved away from 0 by 4 ulp."""
    return value - 4 * math.ulp(value) if value < 0 else up(value)
