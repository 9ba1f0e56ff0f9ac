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
  double lower, upper;

  ADAPMIXED_HD ChargeScale(double lowest, double highest, std::int64_t num_models)
      : others(static_cast<double>(num_models - 1) * lowest),
        slots(others + 1.0),
        share(slots / static_cast<double>(num_models)),
        lower(lowest),
        upper(highest) {}

  // Whether (1+y)^s can be so large that q (1+y)^s is not negligible at q < e^-680.
  ADAPMIXED_HD bool far(double largest_order) const {
    const double most = std::fmax(std::log((upper + others) / slots), -log_least());
    return lower < 1e-30 || largest_order * most > 190.0;
  }

  // An upper bound; 0 if the computed sums are, and then p_bar counts as q.
  ADAPMIXED_HD double of(double forward, double reverse, double order) const {
    if (std::isnan(forward) || std::isnan(reverse)) return HUGE_VAL;
    const double excess = share * std::fmax(std::fmax(forward, reverse), 0.0);
    return excess > 0.0 ? raised(std::log1p(excess) / (order - 1.0)) : 0.0;
  }

  // The same from the logarithms of the two sums.
  ADAPMIXED_HD double of_logs(double forward, double reverse, double order) const {
    if (std::isnan(forward) || std::isnan(reverse)) return HUGE_VAL;
    const double excess = std::log(share) + std::fmax(forward, reverse);
    if (excess == -HUGE_VAL) return 0.0;
    return raised(
        (excess > 0.0 ? excess + std::log1p(std::exp(-excess)) : std::log1p(std::exp(excess))) /
        (order - 1.0));
  }

  // Adds the terms of one token, given log q and log U, to the logarithms of the two sums.
  ADAPMIXED_HD_INLINE void add_log(double log_q, double log_ratio, double order, double& forward,
                                   double& reverse) const {
    const double y = std::expm1(log_ratio) / slots, X = (std::exp(log_ratio) + others) / slots;
    const double log_X = others > 0.0 ? std::log(X) : log_ratio;
    forward = add(forward, log_q + log_power_excess(y, X, log_X, order));
    reverse = add(reverse, log_q + log_power_excess(y, X, log_X, 1.0 - order));
  }

 private:
  ADAPMIXED_HD double log_least() const { return std::log((lower + others) / slots); }

  ADAPMIXED_HD static double add(double a, double b) {
    return a == HUGE_VAL || b == HUGE_VAL ? HUGE_VAL : log_add(a, b);
  }

  // log e_s(y), where X = 1 + y. y <= 1e60, so beside a power above e^300 the other terms are
  // negligible.
  ADAPMIXED_HD static double log_power_excess(double y, double X, double log_X, double s) {
    const double u = s * log_X;
    if (u > 300.0) return u;
    return std::log(std::fabs(y) < 0.25 ? power(y, log_parts(y, X), s).excess
                                        : std::exp(u) - 1.0 - s * y);
  }
};

// log U of one token from t = log p/q.
ADAPMIXED_HD double log_clipped_ratio(double t, double log_scale, double residual, double lower,
                                      double upper) {
  if (t < kClipAbsent) return std::log(residual);
  return vmin(std::log(upper), vmax(std::log(lower), t + log_scale));
}

ADAPMIXED_CORE_END
