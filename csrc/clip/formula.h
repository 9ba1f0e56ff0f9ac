// The density-ratio box: p_bar = clip(s p, c q, C q) with the s that makes it sum to 1. It is the
// KL projection of p onto the distributions whose ratio to q lies in [c, C].
//
// S(s) = sum clip(s p, c q, C q) grows, piecewise linearly, from c to
// C q(supp p) + c (1 - q(supp p)). If that does not reach 1, p_bar = C q on the support of p, and
// off it p_bar is a constant multiple of q, at least c.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/elementary.h"
#include "common/operators.h"

ADAPMIXED_CORE_BEGIN

// The part of q in a model's answer: see Weights.
ADAPMIXED_HD double rest_of(const Weights& weights, std::int64_t at) {
  return weights.upper > 0.0 ? weights.residual[at] : 1.0 - weights.weight[at];
}

// p_bar / q - 1 and p_bar / q, or means of these. Both are kept because each is accurate where the
// other cancels.
template <class T>
struct Projected {
  T excess, ratio;
};

// The largest allowed |S - 1|. If few tokens move with s, their sum must be found within 1e-10, or
// as accurately as S is known.
constexpr double kClipError = 2e-13, kClipRounding = 2e-15;

// With a box, p counts as 0 if the logit is below this. All other p are doubles that s may be
// multiplied by: log s is at most 600 + log C. All kernels compare the same two numbers.
ADAPMIXED_HD double least_clipped(double private_lse) { return private_lse - 600.0; }
constexpr double kMostScale = 620.0;

// Rarer tokens count as this rare. That overstates the charges, and nothing else shows it.
constexpr double kRarestClipped = -690.0;

struct ClipSums {
  double total;   // S + 1 - sum q
  double moving;  // the part that grows with s: s p(v) of the tokens inside the box
};

// Returns whether even p_bar = C q at p > 0 does not reach 1. Then the rest is spread over the
// other tokens in proportion to q. covered, uncovered: q of the tokens with p > 0, and of the
// others; if they do not add up to 1, p_bar sums to the same number.
ADAPMIXED_HD bool clip_covers_too_little(double lower, double upper, double covered,
                                         double uncovered) {
  const double whole = covered + uncovered;
  return upper * covered + lower * uncovered <= whole * (1.0 + kClipRounding);
}
ADAPMIXED_HD double clip_residual(double lower, double upper, double covered, double uncovered) {
  const double rest = 1.0 - (upper - 1.0) * covered / uncovered;
  return std::fmin(std::fmax(lower, rest), 1.0);
}

// Finds log s with S = 1 by Newton's steps in a bracket; a step is exact once no token changes
// sides. sums(log s) computes S. *log_scale is the start, then the result. Ends early if S is
// within `enough` of 1. Returns false if no s up to e^limit gives S = 1.
template <class Sums>
ADAPMIXED_HD bool solve_clip_scale(const Sums& sums, double lower, double limit, double* log_scale,
                                   double enough = kClipRounding) {
  double low = std::log1p(-lower) - 1e-9, high = HUGE_VAL;  // S <= c + s
  double t = *log_scale;
  for (int k = 0; k < 400; ++k) {
    const ClipSums at = sums(t);
    const double gap = 1.0 - at.total;
    if (std::isnan(gap)) return false;
    *log_scale = t;
    const double wanted = std::fmin(kClipError, 1e-10 * at.moving);
    if (std::fabs(gap) <= std::fmax(wanted, enough)) return true;
    (gap > 0.0 ? low : high) = t;
    // Steps that overshoot alternately shrink the bracket slowly, so every fourth step halves it.
    double next = k % 4 == 3 && high < HUGE_VAL ? NAN : t + std::log1p(gap / at.moving);
    if (!(next > low && next < high)) {
      next = high < HUGE_VAL ? 0.5 * (low + high) : t + std::fabs(t) + 1.0;
    }
    if (next == t || next == low || next == high) return true;  // no double is closer
    if (t >= limit && next > t) return false;
    t = std::fmin(next, limit);
  }
  return true;
}

// p_bar / q of one model, t = log p/q, or -inf if p counts as 0.
template <class T>
ADAPMIXED_HD_INLINE Projected<T> clipped(T t, T log_scale, T residual, T lower, T upper) {
  const Ratio<T> r = ratio(t + log_scale);
  const T one(1.0);
  const auto absent = t == T(-HUGE_VAL);
  const T d = vselect(absent, residual - one, vmin(upper - one, vmax(r.d, lower - one)));
  const T whole = vselect(absent, residual, vmin(upper, vmax(r.r, lower)));
  const auto known = t == t;  // NaN stays NaN, so that a row which is not a distribution is noticed
  return {vselect(known, d, t), vselect(known, whole, t)};
}

// log p_bar of one model at a token with logit z.
ADAPMIXED_HD double log_clipped(const Weights& weights, std::int64_t at, double z, double lse,
                                double log_q) {
  if (weights.active != nullptr && !weights.active[at]) return log_q;
  if (log_q == -HUGE_VAL) return log_q;
  if (z < least_clipped(lse)) return log_q + std::log(rest_of(weights, at));
  const double log_ratio = weights.weight[at] + ((z - lse) - log_q);
  // NaN stays NaN.
  return log_q + vmin(std::log(weights.upper), vmax(std::log(weights.lower), log_ratio));
}

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
