"""What a noisy screening of AdaPMixED costs, rounded up.

The losses of its answers are computed from the logits, by the operator `leave_one_out` (formula in
csrc/leave_one_out/formula.h). With loss="fixed" an answer costs `pmixed.sound_bound`.
"""

from __future__ import annotations

from adapmixed.checks import check_count, check_order, check_real
from adapmixed.privacy.rounding import up


def screening_rho(weight: float, sigma: float, num_models: int) -> float:
    """(weight / (N σ))², rounded up: one screening costs order times this at every order.

    The L2 sensitivity is √2 weight / N (noise before re-scaling), so α Δ²/(2σ²) = α (weight/(Nσ))².
    Proof: docs/privacy.md, section 7.
    """
    weight, sigma = check_real("weight", weight), check_real("sigma", sigma)
    if sigma == 0:
        raise ValueError("sigma must be > 0, got 0.0")
    share = up(up(weight / sigma) / check_count("num_models", num_models, 1))
    return 0.0 if weight == 0 else up(share * share)


def screening_rdp(order: float, weight: float, sigma: float, num_models: int) -> float:
    """α (weight / (N σ))², rounded up: the Rényi cost of one noisy screening.

    Proof: docs/privacy.md, section 7.
    """
    order, rho = check_order(order), screening_rho(weight, sigma, num_models)
    return 0.0 if rho == 0 else up(order * rho)
