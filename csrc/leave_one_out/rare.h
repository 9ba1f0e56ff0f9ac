// The tokens of the leave-one-out sums that need the log domain.
#pragma once

#include <cmath>

#include "leave_one_out/formula.h"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN

// The part of a token with q < e^-680 in sum_v (p_bar_i - q), with an error far below any rounding.
ADAPMIXED_HD double rare_gain(const Ensemble& in, const Weights& weights, std::int64_t model,
                              std::int64_t position, std::int64_t v) {
  const std::int64_t at = model * in.shape.positions + position;
  const double z = row_of(in.private_logits, model, position).at(v);
  if (z == -HUGE_VAL || std::isnan(z)) return z == -HUGE_VAL ? 0.0 : z;
  if (weights.upper > 0.0) return 0.0;  // at most upper q
  return weights.weight[at] * std::exp(z - in.private_lse[at]);
}

// The numbers that all models share at one token, not divided by q.
struct RareSums {
  double log_q, log_absent, log_total, log_p;
  bool unmoved;     // p' = p whichever model is left out
  bool negligible;  // every term is below e^-800, or the token does not exist
};

ADAPMIXED_HD RareSums rare_sums(const Ensemble& in, const Weights& weights, std::int64_t position,
                                std::int64_t v, const Neighbours& all) {
  RareSums sums{};
  sums.log_q = row_of(in.public_logits, 0, position).at(v) - in.public_lse[position];
  sums.log_absent = all.absent > 0.0 ? std::log(all.absent) + sums.log_q : -HUGE_VAL;
  const double first = log_projected(in, weights, 0, position, v);
  double high = sums.log_q, low = sums.log_q;
  sums.log_total = sums.log_absent;
  bool agreed = all.absent == 0.0 || first == sums.log_q;
  for (std::int64_t j = 0; j < in.shape.models; ++j) {
    const double own = log_projected(in, weights, j, position, v);
    sums.log_total = log_add(sums.log_total, own);
    high = std::fmax(high, own);
    low = std::fmin(low, own);
    agreed = agreed && own == first;
  }
  sums.log_p = sums.log_total - std::log(all.slots);
  // If all slots agree, p is their common value; a sum of logarithms would not give it back
  // exactly.
  agreed = agreed && !all.alone;
  if (agreed) sums.log_p = first;
  sums.unmoved = agreed && (!all.zero_out || first == sums.log_q);
  // |log p'/p| <= high - low + log N.
  sums.negligible = high == -HUGE_VAL ||
                    high + all.largest_order * (high - low + std::log(all.slots + 1.0)) < -800.0;
  return sums;
}

// p ((p'/p)^s - 1 - s (p'/p - 1)) of a token with t = log p'/p, s > 1 or s < 0. p may be 0 and the
// result large.
ADAPMIXED_HD double rare_excess(double p, double log_p, double t, double s) {
  // It is base (e^{power t} - 1) - power (p' - p), base p' for s > 1 and p for s < 0. For s near 1
  // or 0 both parts are small.
  const double power_of_base = s > 0.0 ? s - 1.0 : s;
  const double gap = std::fabs(t) < 1.0 ? p * std::expm1(t) : std::exp(log_p + t) - p;  // p' - p
  if (!(std::fabs(power_of_base * t) < 1.0)) {
    return std::exp(log_p + s * t) - (s > 0.0 ? p + gap : p) - power_of_base * gap;
  }
  if (std::fabs(t) < 0.2) {  // the parts are nearly the same
    const double d = std::expm1(t);
    return p * power(d, log_parts(d, 1.0 + d), s).excess;
  }
  return (s > 0.0 ? std::exp(log_p + t) : p) * std::expm1(power_of_base * t) - power_of_base * gap;
}

// The terms of one token in the leave-one-out sums.
class RareToken {
 public:
  ADAPMIXED_HD RareToken(const Ensemble& in, const Weights& weights, std::int64_t position,
                         std::int64_t v, const Neighbours& all)
      : RareToken(in, weights, position, v, all, rare_sums(in, weights, position, v, all)) {}
  ADAPMIXED_HD RareToken(const Ensemble& in, const Weights& weights, std::int64_t position,
                         std::int64_t v, const Neighbours& all, const RareSums& sums)
      : in_(in), weights_(weights), all_(all), position_(position), v_(v), sums_(sums) {}

  ADAPMIXED_HD bool negligible() const { return sums_.negligible; }
  ADAPMIXED_HD double log_q() const { return sums_.log_q; }
  ADAPMIXED_HD double log_mixture() const { return sums_.log_p; }

  // log p'(v), where p' is the mixture without model i.
  ADAPMIXED_HD double log_neighbour(std::int64_t i) const {
    if (all_.alone) return sums_.log_q;
    if (sums_.unmoved) return sums_.log_p;
    return all_.zero_out ? log_add(log_rest(i), sums_.log_q) - std::log(all_.slots)
                         : log_rest(i) - std::log(all_.slots - 1.0);
  }

  ADAPMIXED_HD void add(double log_other, double order, double& forward, double& reverse) const {
    if (sums_.log_p == -HUGE_VAL && log_other == -HUGE_VAL) return;
    if (sums_.log_p == -HUGE_VAL || log_other == -HUGE_VAL) {
      forward = reverse = HUGE_VAL;  // one of the two can never produce the token
      return;
    }
    const double t = log_other - sums_.log_p, p = std::exp(sums_.log_p);
    forward += rare_excess(p, sums_.log_p, t, order);
    reverse += rare_excess(p, sums_.log_p, t, 1.0 - order);
  }

  // The same terms without their linear part, added to the logarithms of the two sums.
  ADAPMIXED_HD void add_log(double log_other, double order, double& forward,
                            double& reverse) const {
    if (sums_.log_p == -HUGE_VAL && log_other == -HUGE_VAL) return;
    if (sums_.log_p == -HUGE_VAL || log_other == -HUGE_VAL) {
      forward = reverse = HUGE_VAL;
    } else if (forward < HUGE_VAL) {
      const double log_ratio = log_other - sums_.log_p;
      forward = log_add(forward, sums_.log_p + order * log_ratio);
      reverse = log_add(reverse, sums_.log_p + (1.0 - order) * log_ratio);
    }
  }

 private:
  ADAPMIXED_HD double log_rest(std::int64_t i) const {
    const double gap = log_projected(in_, weights_, i, position_, v_) - sums_.log_total;
    // A quarter of the total or less can be subtracted; else the other models are added.
    if (gap < -1.4) return sums_.log_total + std::log1p(-std::exp(gap));
    double rest = sums_.log_absent;
    for (std::int64_t j = 0; j < in_.shape.models; ++j) {
      if (j != i) rest = log_add(rest, log_projected(in_, weights_, j, position_, v_));
    }
    return rest;
  }

  const Ensemble& in_;
  const Weights& weights_;
  const Neighbours& all_;
  std::int64_t position_, v_;
  RareSums sums_;
};

ADAPMIXED_CORE_END
