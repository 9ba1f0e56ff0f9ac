// The charge of one model's clipped distribution, whatever the other models are.
#pragma once

#include <cmath>
#include <cstdint>

#include "clip/formula.h"

ADAPMIXED_CORE_BEGIN

// An upper bound from a charge whose error is below 1e-5 of it, or below 1e-12.
ADAPMIXED_HD double raised(double charge) { return charge * (1.0 + 1e-5) + 1e-12; }

// The charge to a shard's own budget. Let U = p_bar / q, W = ((N-1) c + 1) / N and
// y = (U - 1) / (N W). With all other slots at their lowest, the charge is the larger one of the
// Renyi divergences in both directions between ((N-1) c + U) / N and W:
//   log1p(W max(sum q e_alpha(y), sum q e_{1-alpha}(y))) / (alpha - 1),
//   e_s(y) = (1+y)^s - 1 - s y.
struct ChargeScale {
  double others;  // (N-1) c
  double slots;   // N W
  double share;   // W

  ADAPMIXED_HD ChargeScale(double lowest, std::int64_t num_models)
      : others(static_cast<double>(num_models - 1) * lowest),
        slots(others + 1.0),
        share(slots / static_cast<double>(num_models)) {}

  // An upper bound; 0 if the computed sums are, and then p_bar counts as q.
  ADAPMIXED_HD double of(double forward, double reverse, double order) const {
    if (std::isnan(forward) || std::isnan(reverse)) return HUGE_VAL;
    const double excess = share * std::fmax(std::fmax(forward, reverse), 0.0);
    return excess > 0.0 ? raised(std::log1p(excess) / (order - 1.0)) : 0.0;
  }
};

ADAPMIXED_CORE_END
