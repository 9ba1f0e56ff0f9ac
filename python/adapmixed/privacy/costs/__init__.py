"""The cost of one answer, in one module for each mechanism; `epsilon.parts_of` composes them.

- ClippedLogPool with clip range [a, b] and scale κ costs ρ = (κ(b - a)/N)²/8
  (`clipped_log_pool.bounded_range_rho`). With per-shard budgets, one member costs
  `clipped_log_pool.individual_rho`.
- ClippedMixing with box [c, C] costs the privacy loss distribution of the worst pair in the box
  (`clipped_mixing.clipped_mixing_pair`). With per-shard budgets, one member costs the charge that
  the operator `clip_project` returns (csrc/clip/charge.h).
- PMixED with a ball of order α and radius R costs log(1 + (e^{(α-1)R} - 1)/N)/(α-1)
  (`pmixed.sound_bound`), and so does AdaPMixED with loss="fixed".
- AdaPMixED costs the Rényi divergence between the answers with and without each member, which the
  operator `leave_one_out` returns (csrc/leave_one_out/formula.h). One screening costs
  α (λ_s/(Nσ))² (`adapmixed.screening_rho` has the factor of α).
- An answer of the public model costs 0. An unprotected answer has no finite cost.
"""
