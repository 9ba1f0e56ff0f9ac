// Algorithm 1, lines 1-8: is a slightly mixed, noised distribution still close to the public one on
// the public top-k tokens? One position; the order of the steps is the paper's (noise, then
// re-scaling).
#pragma once

#include <cmath>

#include "core/config.h"
#include "core/elementary.h"
#include "core/renyi.h"
#include "core/view.h"

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

// p_i - q of one token; 0 for a slot that is not active, which answers q.
ADAPMIXED_HD double screened_difference(const Ensemble& in, const ScreenOptions& options,
                                        std::int64_t model, std::int64_t position,
                                        std::int64_t token, double q) {
  const std::int64_t at = model * in.shape.positions + position;
  if (options.active != nullptr && !options.active[at]) return 0.0;
  return std::exp(row_of(in.private_logits, model, position).at(token) - in.private_lse[at]) - q;
}

// The noised mean of lambda_s p_i + (1 - lambda_s) q, from the sum of those over the models.
ADAPMIXED_HD double screened(const ScreenOptions& options, double q, double difference,
                             double noise) {
  const double share = options.weight / static_cast<double>(options.num_models);
  return q + share * difference + noise;
}

// D_alpha(s || q) after negative values of s are set to 0 and both are re-scaled to sum 1: passes
// over the tokens kept, one after the other. log q may be far below what a double's exponential can
// hold.
class ScreeningSums {
 public:
  ADAPMIXED_HD explicit ScreeningSums(double order) : order_(order) {}

  // First pass: the sums of nonnegative(s) and e^log_q, the best token of which has q >= 1/V. False
  // where nothing is left: the divergence is +inf.
  ADAPMIXED_HD static double nonnegative(double s) { return s > 0.0 ? s : 0.0; }
  ADAPMIXED_HD bool set_totals(double s_total, double q_total) {
    s_total_ = s_total;
    q_total_ = q_total;
    log_q_total_ = std::log(q_total);
    return s_total > 0.0 && !std::isinf(s_total);
  }

  // Second pass: the largest of these.
  ADAPMIXED_HD double log_term(double s, double log_q) const {
    if (!(s > 0.0)) return -HUGE_VAL;
    return order_ * log_ratio(s, log_q) + log_q - log_q_total_;
  }
  ADAPMIXED_HD void set_top(double top) { top_ = top; }

  // Third pass: the sum of these. Near alpha = 1 the plain sum loses more to rounding than it is
  // above 1: both rows sum to 1, so the linear part of every term can be left out.
  ADAPMIXED_HD double term(double s, double log_q) const {
    if (top_ > kLogDomainFrom) return s > 0.0 ? std::exp(log_term(s, log_q) - top_) : 0.0;
    return screening_excess(s / s_total_, std::exp(log_q) / q_total_, log_q - log_q_total_,
                            log_ratio(s, log_q), order_);
  }
  ADAPMIXED_HD double divergence(double total) const {
    return top_ > kLogDomainFrom ? divergence_of_log(top_ + std::log(total), order_)
                                 : divergence_of_excess(total, order_);
  }

 private:
  ADAPMIXED_HD double log_ratio(double s, double log_q) const {
    return std::log(s / s_total_) - (log_q - log_q_total_);
  }

  double order_;
  double s_total_ = 0.0, q_total_ = 0.0, log_q_total_ = 0.0, top_ = 0.0;
};

ADAPMIXED_CORE_END
