// The privacy loss of one model from its excess sums, and the tokens that need the log domain.
#pragma once

#include <cmath>

#include "core/config.h"
#include "core/view.h"

ADAPMIXED_CORE_BEGIN

// D<->_alpha = log1p(max(A, B)) / (alpha - 1). What is not a number is not known to be small: +inf.
ADAPMIXED_HD double divergence_from_excess(double forward, double reverse, double order) {
  if (std::isnan(forward) || std::isnan(reverse)) return HUGE_VAL;
  const double excess = std::fmax(std::fmax(forward, reverse), 0.0);
  return std::log1p(excess) / (order - 1.0);
}

// log(e^a + e^b) for a, b in [-inf, inf); NaN if either is.
ADAPMIXED_HD double log_add(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  const double high = std::fmax(a, b);
  return high == -HUGE_VAL ? high : high + std::log1p(std::exp(std::fmin(a, b) - high));
}

// log p_bar_i(v) from the logits, for tokens whose q is masked or below the range of q * ratio.
ADAPMIXED_HD double log_projected(const Ensemble& in, const Weights& weights, std::int64_t model,
                                  std::int64_t position, std::int64_t v) {
  const std::int64_t at = model * in.shape.positions + position;
  const double log_q = row_of(in.public_logits, 0, position).at(v) - in.public_lse[position];
  const double log_p = row_of(in.private_logits, model, position).at(v) - in.private_lse[at];
  if (log_p == log_q) return log_q;  // exactly, whatever the weight
  // 0 * anything is 0 here, also where the logit is -inf.
  const double from_p = weights.weight[at] > 0.0 ? std::log(weights.weight[at]) + log_p : -HUGE_VAL;
  const double from_q =
      weights.complement[at] > 0.0 ? std::log(weights.complement[at]) + log_q : -HUGE_VAL;
  return log_add(from_p, from_q);
}

// With the sum over all ranks given, p'/p of a model that is nearly the whole mixture of a token is
// what rounding left of a difference. Below this it is not known within 1e-6 / order, and read as
// 0: a loss of +inf.
ADAPMIXED_HD double least_known_ratio(const LeaveOneOutOptions& options) {
  double largest_order = 1.0;
  for (std::int64_t k = 0; k < options.num_orders; ++k) {
    largest_order = std::fmax(largest_order, options.orders[k]);
  }
  return std::fmin(1e-8 * largest_order, 0.25);
}

// One token's terms of the leave-one-out sums, without the ratio to q.
class RareToken {
 public:
  ADAPMIXED_HD RareToken(const Ensemble& in, const Weights& weights, std::int64_t position,
                         std::int64_t v, const LeaveOneOutOptions& options)
      : in_(in), weights_(weights), options_(options), position_(position), v_(v) {
    const double absent = static_cast<double>(options.num_models - in.shape.models);
    log_q_ = row_of(in.public_logits, 0, position).at(v) - in.public_lse[position];
    log_absent_ = absent > 0.0 ? std::log(absent) + log_q_ : -HUGE_VAL;
    const double first = log_projected(in, weights, 0, position, v);
    double high = log_q_, low = log_q_;
    log_total_ = log_absent_;
    bool agreed = absent == 0.0 || first == log_q_;
    for (std::int64_t j = 0; j < in.shape.models; ++j) {
      const double own = log_projected(in, weights, j, position, v);
      log_total_ = log_add(log_total_, own);
      high = std::fmax(high, own);
      low = std::fmin(low, own);
      agreed = agreed && own == first;
    }
    const double slots = static_cast<double>(options.num_models);
    if (options.mean_excess != nullptr) {
      const double mean = 1.0 + options.mean_excess[position * in.shape.vocab + v];
      log_total_ = log_q_ + std::log(mean * slots);
      low = -HUGE_VAL;  // other ranks' models are not seen here
    }
    log_p_ = log_total_ - std::log(slots);
    // Sums of logarithms would not give back what all slots have in common.
    agreed = agreed && options.mean_excess == nullptr && options.num_models > 1;
    if (agreed) log_p_ = first;
    unmoved_ = agreed && (!options.zero_out || first == log_q_);
    double largest_order = 1.0;
    for (std::int64_t k = 0; k < options.num_orders; ++k) {
      largest_order = std::fmax(largest_order, options.orders[k]);
    }
    // |log p'/p| <= high - low + log N: every term is below e^-800, or the token does not exist.
    negligible_ =
        high == -HUGE_VAL || high + largest_order * (high - low + std::log(slots + 1.0)) < -800.0;
  }

  ADAPMIXED_HD bool negligible() const { return negligible_; }
  ADAPMIXED_HD double log_q() const { return log_q_; }
  ADAPMIXED_HD double log_mixture() const { return log_p_; }

  // log p'(v), the mixture without model i.
  ADAPMIXED_HD double log_neighbour(std::int64_t i) const {
    const double slots = static_cast<double>(options_.num_models);
    if (options_.num_models == 1) return log_q_;
    if (unmoved_) return log_p_;
    const double other = options_.zero_out ? log_add(log_rest(i), log_q_) - std::log(slots)
                                           : log_rest(i) - std::log(slots - 1.0);
    if (options_.mean_excess == nullptr) return other;
    // Logarithms far from 0 are rounded more.
    const double least = least_known_ratio(options_) * (1.0 + 0.1 * std::fabs(log_p_));
    return other - log_p_ < std::log(least) ? -HUGE_VAL : other;
  }

  ADAPMIXED_HD void add(double log_other, double order, double& forward, double& reverse) const {
    if (log_p_ == -HUGE_VAL && log_other == -HUGE_VAL) return;
    if (log_p_ == -HUGE_VAL || log_other == -HUGE_VAL) {
      forward = reverse = HUGE_VAL;  // one of the two cannot produce the token at all
      return;
    }
    const double log_ratio = log_other - log_p_;
    const double p = std::exp(log_p_), other = std::exp(log_other);
    forward += std::exp(log_p_ + order * log_ratio) - p - order * (other - p);
    reverse += std::exp(log_p_ + (1.0 - order) * log_ratio) - p - (1.0 - order) * (other - p);
  }

  // The same terms without their linear part, added to the logarithms of the two sums.
  ADAPMIXED_HD void add_log(double log_other, double order, double& forward,
                            double& reverse) const {
    if (log_p_ == -HUGE_VAL && log_other == -HUGE_VAL) return;
    if (log_p_ == -HUGE_VAL || log_other == -HUGE_VAL) {
      forward = reverse = HUGE_VAL;
    } else if (forward < HUGE_VAL) {
      const double log_ratio = log_other - log_p_;
      forward = log_add(forward, log_p_ + order * log_ratio);
      reverse = log_add(reverse, log_p_ + (1.0 - order) * log_ratio);
    }
  }

 private:
  ADAPMIXED_HD double log_rest(std::int64_t i) const {
    const double gap = log_projected(in_, weights_, i, position_, v_) - log_total_;
    // A quarter of the total or less can be subtracted; else, where possible, the others are added.
    if (gap < -1.4 || options_.mean_excess != nullptr) {
      return gap < 0.0 ? log_total_ + std::log1p(-std::exp(gap)) : -HUGE_VAL;
    }
    double rest = log_absent_;
    for (std::int64_t j = 0; j < in_.shape.models; ++j) {
      if (j != i) rest = log_add(rest, log_projected(in_, weights_, j, position_, v_));
    }
    return rest;
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LeaveOneOutOptions& options_;
  std::int64_t position_, v_;
  double log_q_, log_absent_, log_total_, log_p_;
  bool unmoved_;  // p' = p whichever model is left out
  bool negligible_;
};

ADAPMIXED_CORE_END
