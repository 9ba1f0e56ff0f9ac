// Algorithm 1, lines 1-8: is a slightly mixed and noised distribution still close to the public one
// on the public top-k tokens? One position; the order of the steps is the paper's (noise, then
// re-scaling).
//
// With the weight lambda, A active rows and n slots, s = mean of lambda p_i + (1 - lambda) q is
//   q + (lambda/n) sum (p_i - q) = ((n - A) + (1 - lambda) A)/n q + (lambda/n) sum p_i.
// The first form is exact if s is near q, and cancels if s is far below q; the second adds
// nonnegative numbers. A token is represented by t = log(s/q), which is small if s is close to q,
// and stays in range if s and q do not.
#pragma once

#include <cmath>

#include "common/config.h"
#include "common/elementary.h"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

// If the largest log_term exceeds this, the sum of q r^alpha is taken relative to its largest term,
// in the log domain.
constexpr double kLogDomainFrom = 30.0;

// D_alpha = log(1 + excess) / (alpha - 1), or the same from log_sum = log(1 + excess).
ADAPMIXED_HD double divergence_of_excess(double excess, double order) {
  if (std::isnan(excess)) return HUGE_VAL;
  return std::log1p(std::fmax(excess, 0.0)) / (order - 1.0);
}
ADAPMIXED_HD double divergence_of_log(double log_sum, double order) {
  return std::fmax(log_sum, 0.0) / (order - 1.0);
}

// Returns whether a row is active; the slots of the others answer q.
ADAPMIXED_HD bool screened_active(const Ensemble& in, const ScreenOptions& options,
                                  std::int64_t model, std::int64_t position) {
  return options.active == nullptr || options.active[model * in.shape.positions + position];
}

ADAPMIXED_HD double screened_log_p(const Ensemble& in, std::int64_t model, std::int64_t position,
                                   std::int64_t token) {
  return row_of(in.private_logits, model, position).at(token) -
         in.private_lse[model * in.shape.positions + position];
}

// s/q of one position's tokens.
class ScreeningMean {
 public:
  ADAPMIXED_HD ScreeningMean(const ScreenOptions& options, std::int64_t active) {
    const double slots = static_cast<double>(options.num_models), on = static_cast<double>(active);
    share_ = options.weight / slots;
    rest_ = ((slots - on) + (1.0 - options.weight) * on) / slots;
  }

  // Returns whether s, before the noise, is too small for a double. Sums are over the active rows.
  ADAPMIXED_HD bool rare(double log_q, double sum_p) const {
    return rest_ * std::exp(log_q) + share_ * sum_p < 1e-290;
  }

  // log(s/q) with noise; -inf if nothing is left of s.
  ADAPMIXED_HD double log_ratio(double log_q, double sum_p, double sum_difference,
                                double noise) const {
    const double q = std::exp(log_q), excess = share_ * sum_difference + noise;
    if (q > 1e-290 && excess >= -0.5 * q) return std::log1p(excess / q);
    const double s = rest_ * q + share_ * sum_p + noise;
    return s > 0.0 ? std::log(s) - log_q : none(s <= 0.0, noise);
  }

  // log(s/q) of a rare token, from logarithms.
  ADAPMIXED_HD double rare_log_ratio(double log_q, double log_sum_p, double noise) const {
    const double log_s = log_add(std::log(rest_) + log_q, std::log(share_) + log_sum_p);
    const double log_noise = std::log(std::fabs(noise));
    if (noise >= 0.0) return log_add(log_s, log_noise) - log_q;
    return log_noise < log_s ? log_s + std::log1p(-std::exp(log_noise - log_s)) - log_q
                             : none(log_noise >= log_s, noise);
  }

 private:
  // -inf if it is known that nothing is left, else NaN, so that a row which is not a distribution
  // is noticed.
  ADAPMIXED_HD static double none(bool known, double noise) {
    return known && std::fabs(noise) < HUGE_VAL ? -HUGE_VAL : NAN;
  }

  double share_, rest_;
};

// D_alpha(s || q) after both are re-scaled to sum 1, in several passes over the kept tokens. Each
// token is given by t = log(s/q) and l = log q minus that of the likeliest token. The divergence is
// exactly 0 if all t are 0, and for a single token.
class ScreeningSums {
 public:
  ADAPMIXED_HD explicit ScreeningSums(double order) : order_(order) {}

  // First pass: the largest l + t. Returns false if nothing is left; the divergence is then +inf.
  ADAPMIXED_HD bool set_largest(double largest) {
    largest_ = largest;
    return largest > -HUGE_VAL && largest < HUGE_VAL;
  }

  // Second pass: the sums of these. set_totals returns false if a t is NaN.
  ADAPMIXED_HD double s_part(double t, double l) const { return std::exp(l + t - largest_); }
  ADAPMIXED_HD static double q_part(double l) { return std::exp(l); }
  ADAPMIXED_HD bool set_totals(double s_total, double q_total) {
    log_q_total_ = std::log(q_total);
    log_scale_ = (largest_ + std::log(s_total)) - log_q_total_;
    return std::fabs(log_scale_) < HUGE_VAL;
  }

  // Third pass: the largest log_term.
  ADAPMIXED_HD double log_term(double t, double l) const {
    return order_ * (t - log_scale_) + (l - log_q_total_);
  }
  ADAPMIXED_HD void set_top(double top) { top_ = top; }

  // Fourth pass: the sum of term. Near alpha = 1 the rounding of the plain sum exceeds its distance
  // from 1. Both rows sum to 1, so the linear part of every term can be left out.
  ADAPMIXED_HD double term(double t, double l) const {
    if (top_ > kLogDomainFrom) return std::exp(log_term(t, l) - top_);
    return excess(t - log_scale_, l - log_q_total_);
  }
  ADAPMIXED_HD double divergence(double total) const {
    if (top_ == HUGE_VAL) return HUGE_VAL;  // at an order near the largest double
    return top_ > kLogDomainFrom ? divergence_of_log(top_ + std::log(total), order_)
                                 : divergence_of_excess(total, order_);
  }

 private:
  // q ((s/q)^alpha - 1 - alpha (s/q - 1)), with log_ratio = log(s/q).
  ADAPMIXED_HD double excess(double log_ratio, double log_q) const {
    const double q = std::exp(log_q), eta = order_ - 1.0, u = eta * log_ratio;
    if (std::fabs(log_ratio) < 0.2 && std::fabs(u) < 1.0) {  // else the power might overflow
      const double x = std::expm1(log_ratio);
      return q * power(x, log_parts(x, 1.0 + x), order_).excess;
    }
    // (s (s/q)^eta - s) - eta (s - q): if eta is small, all terms are of its size.
    const double s = std::exp(log_q + log_ratio);
    return (u < 1.0 ? s * std::expm1(u) : std::exp(log_q + order_ * log_ratio) - s) - eta * (s - q);
  }

  double order_;
  double largest_ = 0.0, log_q_total_ = 0.0, log_scale_ = 0.0, top_ = 0.0;
};

ADAPMIXED_CORE_END
