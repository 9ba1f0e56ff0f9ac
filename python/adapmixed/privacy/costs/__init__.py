"""What one answer costs, a module for each mechanism.

- ClippedLogPool: `clipped_log_pool.bounded_range_rho`; of one member `individual_rho`.
- ClippedMixing: `clipped_mixing.clipped_mixing_pair`, the dominating pair; of one member the charge
  that the operator `clip_project` returns.
- PMixED, and AdaPMixED with loss="fixed": `pmixed.sound_bound`.
- AdaPMixED: the losses that the operator `leave_one_out` returns; its screening
  `conversions.screening_rho`.
"""
