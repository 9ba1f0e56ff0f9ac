// Algorithm 1, lines 1-8: is a slightly mixed, noised distribution still close to the public one on
// the public top-k tokens? One position; the order of the steps is the paper's (noise, then
// re-scaling).
#pragma once

#include <cmath>

#include "core/config.h"
#include "core/elementary.h"
#include "core/renyi.h"

ADAPMIXED_CORE_BEGIN

// (1+x)^alpha - 1 - alpha x times q; s = q (1 + x) and log_ratio = log(1 + x).
ADAPMIXED_HD double screening_excess(double s, double q, double log_q, double log_ratio,
                                     double order) {
  if (s == 0.0) return (order - 1.0) * q;
  if (std::fabs(log_ratio) < 0.2) {
    if (q < 1e-290) return 0.0;  // x is not at hand, and does not matter
    const double x = (s - q) / q;
    return q * power(x, log_parts(x, 1.0 + x), order).excess;
  }
  return std::exp(order * log_ratio + log_q) - q - order * (s - q);
}

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
  const auto log_ratio = [&](std::int64_t j) {
    return std::log(s[j] / s_total) - (log_q[j] - log_q_total);
  };
  double top = -HUGE_VAL;
  for (std::int64_t j = 0; j < count; ++j) {
    if (s[j] > 0.0) top = std::fmax(top, order * log_ratio(j) + log_q[j] - log_q_total);
  }
  double total = 0.0;
  if (top > kLogDomainFrom) {
    for (std::int64_t j = 0; j < count; ++j) {
      if (s[j] > 0.0) total += std::exp(order * log_ratio(j) + log_q[j] - log_q_total - top);
    }
    return divergence_of_log(top + std::log(total), order);
  }
  // Near alpha = 1 the plain sum loses more to rounding than it is above 1: both rows sum to 1, so
  // the linear part of every term can be left out.
  for (std::int64_t j = 0; j < count; ++j) {
    total += screening_excess(s[j] / s_total, std::exp(log_q[j]) / q_total, log_q[j] - log_q_total,
                              log_ratio(j), order);
  }
  return divergence_of_excess(total, order);
}

ADAPMIXED_CORE_END
