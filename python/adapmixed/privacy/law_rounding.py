"""How far ClippedMixing's computed laws lie from means of rows in its box, and what that costs."""

from __future__ import annotations

from adapmixed.privacy.checks import check_count, check_order

MAX_VOCABULARY = 2**20
"""V up to which `ROW_SUMS` holds."""

ROW_SUMS = 4e-12
"""e₀: by which the operator's rows of a position may differ in sum."""

LEAST_LOWER = 1e-30
"""The lowest c > 0: with c below it a ratio may be lost where doubles end."""


def rounding_of_laws(num_models: int) -> float:
    """η = 4 e₀ + N 2^-52: computed answers are within e^±η per token of such a mean.

    Proof: docs/privacy.md, section 11, "What the kernels do".
    """
    return 4 * ROW_SUMS + check_count("num_models", num_models, 1) * 2.0**-52


def charge_rounding(order: float, num_models: int) -> tuple[float, float]:
    """(relative, absolute): what rounding of the laws adds to a model's Rényi charge, rounded up.

    The lemma's charge is for the exact mean of rows of mean 1. Rows that differ in sum leave the
    others a little less than lower q each, which is relative, and the computed answers lie within
    e^±η of that mean, which adds (2α-1)/(α-1) η. docs/privacy.md, section 13, "Rounding".

    Args:
        order: α > 1.  num_models: N >= 1.
    """
    order, eta = check_order(order), rounding_of_laws(num_models)
    return 2 * (order + 1) * ROW_SUMS, (2 * order - 1) / (order - 1) * (1 + 2.0**-50) * eta
