"""The cost of AdaPMixED's noisy screening, rounded up.

The operator `leave_one_out` computes the losses of the answers from the logits (formula in
csrc/leave_one_out/formula.h). With loss="fixed", an answer costs `pmixed.sound_bound`.
"""

from __future__ import annotations

from adapmixed.privacy.rounding import up


def screening_rho(weight: float, sigma: float, num_models: int) -> float:
    """Return (λ_s/(Nσ))², rounded up; one screening costs α times this at every Rényi order α.

    With noise before re-scaling, the L2 sensitivity is Δ = √2 λ_s/N, so the Rényi cost is
    α Δ²/(2σ²) = α (λ_s/(Nσ))². This is the paper's theorem on noisy screening (Algorithm 1,
    line 6); docs/theory/adapmixed.md has the proof.

    Args:
        weight: λ_s ≥ 0, weight of the private models in the screened mixture.
        sigma: σ > 0, standard deviation of the noise.
        num_models: N ≥ 1.
    """
    share = up(up(weight / sigma) / num_models)
    return 0.0 if weight == 0 else up(share * share)
