"""ClippedLogPool: the zCDP cost of an answer whose log-ratio has a bounded range."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from adapmixed.privacy.checks import check_clip, check_count, check_question, check_real

RANGE_ERROR = 1e-9
"""Relative widening of the accounted range η beyond the nominal one.

It covers answers computed within a relative error of RANGE_ERROR η / 5 per token of the exact pool.
"""


def bounded_range_rho(
    scale: float, lower: float, upper: float, num_models: int, adjacency: str
) -> float:
    """ρ = η²/8 of one answer of ClippedLogPool, rounded up: α ρ at every Rényi order, both ways.

    η = κ (b - a)/N for "zero_out" and "add_remove", which are the same thing here (N is a constant
    of the formula); twice that for "replace_one". Proof: docs/privacy.md, section 12.

    Args:
        scale: κ >= 0.  lower, upper: a <= 0 <= b, log units.  num_models: N >= 1.
    """
    scale, (low, high) = check_real("scale", scale), check_clip(lower, upper)
    models, adjacency = check_count("num_models", num_models, 1), check_question(adjacency)
    nominal = scale * (high - low) / models
    if nominal == 0 and (scale == 0 or high == low):
        return 0.0
    # Three roundings of 2^-53 and an underflow: far below RANGE_ERROR and one unit in the last.
    span = math.nextafter(nominal * (1 + RANGE_ERROR), math.inf)
    if adjacency == "replace_one":
        span *= 2
    return math.nextafter(math.nextafter(span * span, math.inf) / 8, math.inf)


def individual_rho(
    span: NDArray[np.float64], scale: float, lower: float, upper: float, num_models: int
) -> NDArray[np.float64]:
    """ρ_i = (κ span_i/N)²/8 of every model, rounded up: what a per-model filter charges.

    span_i = max u_i - min u_i is the range of model i's own clipped log-ratios (zero-out and
    add/remove). The range is widened by `RANGE_ERROR` and by what rounding adds to a log-ratio.

    Args:
        span: any shape, float64, in [0, b - a].
        scale: κ >= 0.  lower, upper: a <= 0 <= b, log units.  num_models: N >= 1.
    """
    scale, (low, high) = check_real("scale", scale), check_clip(lower, upper)
    models = check_count("num_models", num_models, 1)
    rounding = 2.0**-48 * (1 + scale * max(-low, high) + 750)
    eta = (span * (scale / models) * (1 + RANGE_ERROR) + rounding) * (1 + 2.0**-50)
    return np.asarray(eta * eta / 8 * (1 + 2.0**-50), dtype=np.float64)
