"""ClippedLogPool: the zCDP cost of an answer whose log-ratio has a bounded range."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from adapmixed.checks import check_clip, check_count, check_question, check_real

RANGE_ERROR = 1e-9
"""Relative widening of the accounted range η beyond the nominal one, besides `range_rounding`."""


def range_rounding(scale: float, lower: float, upper: float) -> float:
    """Return what rounding can add to the range of log p/p', in nats, doubled.

    The operator's bound is 2^-49 (1 + κ max(-a, b) + L), L the largest -log q of the tokens
    compared (csrc/log_pool/formula.h); float64 has none beyond 750. docs/privacy.md, section 12,
    "Rounding".
    """
    return 2.0**-48 * (1 + scale * max(-lower, upper) + 750)


def bounded_range_rho(
    scale: float, lower: float, upper: float, num_models: int, adjacency: str
) -> float:
    """Return ρ = η²/8 of one answer, rounded up: α ρ at every Rényi order, both ways.

    η = κ (b - a)/N for "zero_out" and twice that for "replace_one". N is a public constant, so a
    missing member costs what an emptied one does. Proofs: docs/privacy.md, section 12.

    Args:
        scale: κ >= 0.  lower, upper: a <= 0 <= b, log units.  num_models: N >= 1.
    """
    scale, (low, high) = check_real("scale", scale), check_clip(lower, upper)
    models, adjacency = check_count("num_models", num_models), check_question(adjacency)
    nominal = scale * (high - low) / models
    if nominal == 0 and (scale == 0 or high == low):
        return 0.0
    # A few roundings of 2^-53 here are far below RANGE_ERROR and one unit in the last.
    wide = nominal * (1 + RANGE_ERROR) + range_rounding(scale, low, high)
    span = math.nextafter(wide, math.inf)
    if adjacency == "replace_one":
        span *= 2
    return math.nextafter(math.nextafter(span * span, math.inf) / 8, math.inf)


def individual_rho(
    span: NDArray[np.float64], scale: float, lower: float, upper: float, num_models: int
) -> NDArray[np.float64]:
    """Return ρ_i = (κ span_i/N)²/8 of every model, rounded up: its individual charge.

    span_i = max u_i - min u_i is the range of model i's own clipped log-ratios (zero-out).
    Widened as there; docs/privacy.md, section 13.

    Args:
        span: any shape, float64, in [0, b - a].
        scale: κ >= 0.  lower, upper: a <= 0 <= b, log units.  num_models: N >= 1.
    """
    scale, (low, high) = check_real("scale", scale), check_clip(lower, upper)
    models = check_count("num_models", num_models)
    wide = span * (scale / models) * (1 + RANGE_ERROR) + range_rounding(scale, low, high)
    eta = wide * (1 + 2.0**-50)
    return np.asarray(eta * eta / 8 * (1 + 2.0**-50), dtype=np.float64)
