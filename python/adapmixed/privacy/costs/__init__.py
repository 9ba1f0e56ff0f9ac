"""What one answer costs, a module for each mechanism; `epsilon.parts_of` composes the events.

- ClippedLogPool, box [a, b], scale κ: ρ = (κ(b - a)/N)²/8, `clipped_log_pool.bounded_range_rho`;
  of one member under a budget of its own `individual_rho`.
- ClippedMixing, box [c, C]: the privacy loss distribution of the worst pair in the box,
  `clipped_mixing.clipped_mixing_pair`; of one member the charge that the operator `clip_project`
  returns (csrc/clip/charge.h).
- PMixED, and AdaPMixED with loss="fixed", ball of order α and radius R:
  log(1 + (e^{(α-1)R} - 1)/N)/(α-1), `pmixed.sound_bound`.
- AdaPMixED: the Rényi losses between the answers with and without each member, which the operator
  `leave_one_out` returns (csrc/leave_one_out/formula.h); its screening α (λ_s/(Nσ))²,
  `adapmixed.screening_rho`.
- An answer of the public model costs 0, an unprotected one has no finite cost.
"""
