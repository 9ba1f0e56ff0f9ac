"""The range of ClippedLogPool's log-ratios, and the zCDP cost that follows from it.

`costs/__init__.py` lists the costs of all mechanisms; `bounded_range` composes ranges.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

RANGE_ERROR = 1e-9
"""Relative widening of the accounted range η, to which `range_rounding` is added."""


def range_rounding(scale: float, lower: float, upper: float) -> float:
    """Return twice the amount that rounding can add to the range of log p/p', in nats.

    The operator's bound is 2^-49 (1 + κ max(-a, b) + L), where L is the largest -log q of the
    tokens compared (csrc/log_pool/formula.h). Float64 has no L beyond 750. See "Rounding" in
    docs/theory/clipped-log-pool.md. Arguments are those of :func:`answer_range`.
    """
    return 2.0**-48 * (1 + scale * max(-lower, upper) + 750)


def answer_range(
    scale: float, lower: float, upper: float, num_models: int, adjacency: str
) -> float:
    """Return the range η of log p/p' of one answer, in nats, rounded up.

    η = κ (b - a)/N for "zero_out" and twice that for "replace_one". N is a public constant, so a
    missing member costs as much as an emptied one. docs/theory/clipped-log-pool.md has the proof.

    Args:
        scale: κ ≥ 0.
        lower: a ≤ 0, in log units.
        upper: b ≥ 0, in log units.
        num_models: N ≥ 1.
        adjacency: "zero_out" or "replace_one".
    """
    nominal = scale * (upper - lower) / num_models
    if nominal == 0 and (scale == 0 or upper == lower):
        return 0.0
    # A few roundings of 2^-53 here are far below RANGE_ERROR and one unit in the last place.
    wide = nominal * (1 + RANGE_ERROR) + range_rounding(scale, lower, upper)
    span = math.nextafter(wide, math.inf)
    return 2 * span if adjacency == "replace_one" else span


def bounded_range_rho(
    scale: float, lower: float, upper: float, num_models: int, adjacency: str
) -> float:
    """Return the zCDP cost ρ = η²/8 of one answer of range η, rounded up.

    The answer costs α ρ at every Rényi order α, in both directions; see
    docs/theory/clipped-log-pool.md. Arguments and errors are those of :func:`answer_range`.
    """
    span = answer_range(scale, lower, upper, num_models, adjacency)
    return math.nextafter(math.nextafter(span * span, math.inf) / 8, math.inf) if span else 0.0


def individual_rho(
    span: NDArray[np.float64], scale: float, lower: float, upper: float, num_models: int
) -> NDArray[np.float64]:
    """Return the individual zCDP charge ρ_i = (κ span_i/N)²/8 of every model, rounded up.

    span_i = max u_i - min u_i is the range of model i's own clipped log-ratios, so the charge is
    for zero-out. It is widened as in :func:`bounded_range_rho`. docs/theory/per-shard-budgets.md
    has the proof. Other arguments are those of :func:`answer_range`.

    Args:
        span: float64 of any shape, in [0, b - a].

    Returns:
        ρ_i, float64 of the shape of `span`.
    """
    wide = span * (scale / num_models) * (1 + RANGE_ERROR) + range_rounding(scale, lower, upper)
    eta = wide * (1 + 2.0**-50)
    return np.asarray(eta * eta / 8 * (1 + 2.0**-50), dtype=np.float64)
