// Algorithm 1, lines 1-8: is a slightly mixed, noised distribution still close to the public one on
// the public top-k tokens? One position; the order of the steps is the paper's (noise, then
// re-scaling).
#pragma once

#include <cmath>

#include "core/config.h"
#include "core/view.h"

ADAPMIXED_CORE_BEGIN

// s[j] on entry: the noised mean lambda_s p_i + (1 - lambda_s) q of token j; log_q[j] of the public
// one, which may be far below what a double's exponential can hold.
// Returns D_alpha(s || q) after negative values are set to 0 and both are re-scaled to sum 1.
ADAPMIXED_HD double screening_divergence(double* s, const double* log_q, std::int64_t count,
                                         double order) {
  double s_total = 0.0, q_total = 0.0;
  for (std::int64_t j = 0; j < count; ++j) {
    s[j] = s[j] > 0.0 ? s[j] : 0.0;
    s_total += s[j];
    q_total += std::exp(log_q[j]);  // the best token has q >= 1/V
  }
  if (!(s_total > 0.0) || std::isinf(s_total)) return HUGE_VAL;
  const double log_q_total = std::log(q_total);
  double top = -HUGE_VAL;
  for (std::int64_t j = 0; j < count; ++j) {
    if (s[j] == 0.0) continue;
    const double lq = log_q[j] - log_q_total;
    top = std::fmax(top, order * (std::log(s[j] / s_total) - lq) + lq);
  }
  double total = 0.0;
  for (std::int64_t j = 0; j < count; ++j) {
    if (s[j] == 0.0) continue;
    const double lq = log_q[j] - log_q_total;
    total += std::exp(order * (std::log(s[j] / s_total) - lq) + lq - top);
  }
  return std::fmax((top + std::log(total)) / (order - 1.0), 0.0);
}

ADAPMIXED_CORE_END
