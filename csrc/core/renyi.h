// Limits of the Renyi divergence and how one sum turns into one divergence.
#pragma once

#include <cmath>

#include "core/config.h"

ADAPMIXED_CORE_BEGIN

// Above this the sum of q r^alpha is taken relative to its largest term, in the log domain.
constexpr double kLogDomainFrom = 30.0;

// D_alpha = log(1 + excess) / (alpha - 1), or from log_sum where that is known instead.
ADAPMIXED_HD double divergence_of_excess(double excess, double order) {
  return std::log1p(std::fmax(excess, 0.0)) / (order - 1.0);
}
ADAPMIXED_HD double divergence_of_log(double log_sum, double order) {
  return std::fmax(log_sum, 0.0) / (order - 1.0);
}

ADAPMIXED_CORE_END
