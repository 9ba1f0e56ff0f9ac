// The largest weight lambda in [0, 1] with F(lambda), G(lambda) <= T = e^{(alpha-1) R}, where
//   F = sum_v q (1 + lambda d)^alpha,  G = sum_v q (1 + lambda d)^{1-alpha},  d = p/q - 1.
//
// F^{1/alpha} is convex and G^{-1/(alpha-1)} concave in lambda, so the root of a tangent of either
// is an upper bound on the answer, on whichever side of it the tangent is drawn. The search keeps
//   lower: the last point *evaluated* and found feasible (this is returned), and
//   upper: the least tangent root or infeasible point seen.
#pragma once

#include <cmath>

#include "common/config.h"

ADAPMIXED_CORE_BEGIN

// lambda and 1 - lambda; the smaller of the two has full relative accuracy.
struct Point {
  double weight, complement;
};

ADAPMIXED_HD bool below(const Point& a, const Point& b) {
  return a.weight < b.weight || (a.weight == b.weight && a.complement > b.complement);
}

ADAPMIXED_HD Point at_weight(double weight) {
  double complement = 1.0 - weight;
  if (1.0 - complement > weight) complement = std::nextafter(complement, 2.0);
  return {weight, complement};
}

// The weight is rounded down: for a complement of 2e-22 it is the double below 1, not 1.
ADAPMIXED_HD Point at_complement(double complement) {
  double weight = 1.0 - complement;
  if (1.0 - weight < complement) weight = std::nextafter(weight, 0.0);
  return {weight, complement};
}

// An upper bound on the point that is a computed step away. The step has a relative error, which
// matters most if the step nearly cancels the complement.
constexpr double kDoubleStepError = 1e-12;
ADAPMIXED_HD Point shifted(const Point& p, double computed_step, double error = kDoubleStepError) {
  const double step = computed_step + error * std::fabs(computed_step);
  const double weight = p.weight + step;
  if (weight <= 0.0) return {0.0, 1.0};
  if (weight <= 0.5) return at_weight(weight);
  const double complement = p.complement - step;
  return complement <= 0.0 ? Point{1.0, 0.0} : at_complement(complement);
}

// One constraint at one point. value is <= 0 if it holds, margin included. step leads, in lambda,
// to the point where the tangent meets the bound; it is not finite if the sums overflowed. Rounding
// can make a slope near 0 negative, and large slopes overflow; sums near the least double lack
// terms that underflowed. Such a tangent gives no bound, and the steps stay infinite. log_step is
// Newton's step in -log(1 - lambda): a proposal, not a bound.
struct Bound {
  double value = 0.0;
  double step = HUGE_VAL;
  double log_step = HUGE_VAL;
};
constexpr double kLeastSum = 1e-290;
ADAPMIXED_HD bool has_tangent(double sum, double slope) {
  return sum > kLeastSum && slope > kLeastSum && slope < HUGE_VAL;
}

// f is F = 1 + A in excess form, F / T in scaled form; slope is its derivative.
ADAPMIXED_HD Bound forward_bound(double log_gap, double f, double slope, double order) {
  if (!has_tangent(f, slope)) return {log_gap, HUGE_VAL, HUGE_VAL};
  return {log_gap, std::expm1(-log_gap / order) * order * f / slope, HUGE_VAL};
}
// b is the excess B, or G / T in scaled form. Tokens that only p lacks make it grow like
// (1-lambda)^{1-alpha}: log B is nearly straight in -log(1-lambda), and a tangent in lambda is
// nearly useless. log_ratio: the log of B over its bound.
ADAPMIXED_HD Bound reverse_bound(double log_gap, double g, double b, double log_ratio, double slope,
                                 double order, double complement) {
  if (!has_tangent(g, slope)) return {log_gap, HUGE_VAL, HUGE_VAL};
  return {log_gap, -std::expm1(log_gap / (order - 1.0)) * (order - 1.0) * g / slope,
          -log_ratio * b / (slope * complement)};
}

// The bounds of the constraints. r = p/q has the relative error `ratio_error`. To be safe, the
// bounds are lowered by more than this error can move the sums.
struct Target {
  bool scaled;        // T too large for excess sums: compare F / T with 1
  double log_target;  // (alpha - 1) R
  double excess;      // T - 1 after the margin (excess form)
  double log_margin;  // margin of the scaled form
};

// From this log T on, only tokens with terms near T matter: all others add at most sum q = 1.
constexpr double kScaledFrom = 20.0;

ADAPMIXED_HD Target make_target(double order, double radius, double ratio_error) {
  Target t{};
  t.log_target = (order - 1.0) * radius;
  t.scaled = t.log_target >= kScaledFrom;
  t.log_margin = 1e-8 + 4.0 * order * ratio_error;
  const double excess = std::expm1(std::fmin(t.log_target, kScaledFrom));
  if (excess > 0.0) {
    // |error of A| <= sum q alpha(alpha-1) lambda^2 |d| r eps: by Cauchy-Schwarz at most
    // eps sqrt(2 alpha (alpha-1) (T-1)) for small x, and alpha eps A for large x. The last term is
    // the rounding of 1 + x itself. lambda is promised within 1e-5 of the optimum, for which the
    // square root and the last term must be below some 2e-5. Hence excess >= 1e-12 alpha^2 for the
    // square root, and excess >= 1e-9 alpha for the last term.
    const double margin =
        1e-8 + 4.0 * ratio_error * (order + std::sqrt(2.0 * order * (order - 1.0) / excess)) +
        4e-15 * order / excess;
    t.excess = margin < 1.0 ? excess * (1.0 - margin) : 0.0;
  }
  return t;
}

// How close the search comes to the answer, and the error of tangents' steps from the sums; both
// relative. The defaults are for sums in double.
struct Precision {
  double tolerance = 1e-7, step_error = kDoubleStepError;
};

// The next point to try, a little below `upper`.
ADAPMIXED_HD Point inside(const Point& upper, double towards_one, double tolerance) {
  if (upper.weight <= 0.5) return at_weight(upper.weight * (1.0 - 0.5 * tolerance));
  if (upper.complement > 0.0) return at_complement(upper.complement * (1.0 + 0.5 * tolerance));
  return at_complement(towards_one);  // lambda = 1 has failed, and no tangent gives a bound
}

ADAPMIXED_HD Point middle(const Point& lower, const Point& upper) {
  if (upper.weight <= 0.5) {
    return at_weight(lower.weight > 0.0 ? std::sqrt(lower.weight) * std::sqrt(upper.weight)
                                        : 1e-3 * upper.weight);
  }
  if (lower.complement > 0.25) return at_complement(0.5 * (lower.complement + upper.complement));
  return at_complement(upper.complement > 0.0
                           ? std::sqrt(lower.complement) * std::sqrt(upper.complement)
                           : 1e-3 * lower.complement);
}

// G <= (1-lambda)^{1-alpha} always, so the reverse constraint holds if 1-lambda >= e^{-R}, this
// much. If R is so large that e^{-R} underflows, lambda = 1 is still not free.
ADAPMIXED_HD double reverse_free(double radius) {
  return std::fmax(std::exp(-radius) * (1.0 + 1e-7), 2.3e-308);
}

// Searches with evaluate(point, want_forward, want_reverse, Bound& forward, Bound& reverse).
// `upper`: any upper bound on the answer, (1, 0) included. `start`: the first point tried.
ADAPMIXED_HD_CALLBACK
template <class Evaluate>
ADAPMIXED_HD Point largest_weight(const Evaluate& evaluate, double radius, Point start, Point upper,
                                  const Precision& precision) {
  const double tolerance = precision.tolerance;
  Point lower{0.0, 1.0};
  Point forward_holds = lower, reverse_holds = lower;  // the constraint is known to hold up to here
  bool one_failed = false;
  int slow = 0;            // infeasible points without a useful proposal since the last halving
  Point barren{2.0, 0.0};  // the last infeasible point without a tangent
  const double free_complement = reverse_free(radius);
  double towards_one = 0.5 * free_complement;
  Point x = below(start, upper) ? start : upper;
  for (int trial = 0; trial < 80; ++trial) {
    const bool want_forward = below(forward_holds, x);
    const bool want_reverse = x.complement < free_complement && below(reverse_holds, x);
    Bound forward, reverse;
    evaluate(x, want_forward, want_reverse, forward, reverse);
    const bool forward_ok = !want_forward || forward.value <= 0.0;
    const bool reverse_ok = !want_reverse || reverse.value <= 0.0;
    if (want_forward && forward_ok) forward_holds = x;
    if (want_reverse && reverse_ok) reverse_holds = x;
    const bool feasible = forward_ok && reverse_ok;
    if (feasible) {
      if (x.complement == 0.0) return x;
      if (below(lower, x)) lower = x;
    } else {
      if (below(x, upper)) upper = x;
      if (x.complement == 0.0) one_failed = true;
    }
    if (want_forward && std::isfinite(forward.step)) {
      const Point root = shifted(x, forward.step, precision.step_error);
      if (below(root, upper)) upper = root;
    }
    if (want_reverse && std::isfinite(reverse.step)) {
      const Point root = shifted(x, reverse.step, precision.step_error);
      if (below(root, upper)) upper = root;
    }
    const bool weight_found = upper.weight <= lower.weight * (1.0 + tolerance);
    const bool complement_found =
        lower.complement <= upper.complement * (1.0 + 2.0 * tolerance) || trial > 40;
    if (weight_found && complement_found) return lower;
    if (upper.complement == 0.0 && !one_failed) {
      x = upper;
    } else {
      const bool proposed = want_reverse && std::isfinite(reverse.log_step);
      if (proposed && reverse_ok) {
        towards_one = x.complement * std::exp(-std::fmin(std::fmax(reverse.log_step, 0.1), 200.0));
      } else {
        const double nearest = lower.complement;
        towards_one = std::fmin(towards_one, nearest * std::fmin(nearest, 0.25));
      }
      towards_one = std::fmax(towards_one, 2.3e-308);  // the least normal number
      // An infeasible x without a tangent tells only that the answer is below it.
      if (!feasible && !(want_forward && std::isfinite(forward.step)) &&
          !(want_reverse && std::isfinite(reverse.step))) {
        barren = x;
      }
      bool halve = trial % 12 == 11 || (upper.complement > 0.0 && !below(upper, barren));
      Point next = inside(upper, towards_one, tolerance);
      if (proposed && x.complement < 0.1) {
        const double near =
            x.complement * std::exp(-std::fmax(reverse.log_step, -700.0)) * (1.0 + 0.5 * tolerance);
        // A tangent from the feasible side is not trusted if it leads far away.
        const double least = reverse_ok ? 4.0 * next.complement : next.complement;
        if (near > least && near < lower.complement) next = at_complement(near);
        // Infeasible, without a useful proposal, and the tangents make little progress.
        if (!reverse_ok && near >= lower.complement &&
            (upper.complement < 2.0 * x.complement || ++slow == 3)) {
          halve = true;
          slow = 0;
        }
      }
      // The tangents no longer move (rounding), or progress is slow: halve the interval.
      x = halve || !below(lower, next) ? middle(lower, upper) : next;
      if (!below(lower, x)) return lower;
    }
  }
  return lower;
}

ADAPMIXED_CORE_END
