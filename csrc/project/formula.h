// The largest weight lambda in [0, 1] with F(lambda), G(lambda) <= T = e^{(alpha-1) R}, where
//   F = sum_v q (1 + lambda d)^alpha,  G = sum_v q (1 + lambda d)^{1-alpha},  d = p/q - 1.
//
// F^{1/alpha} is convex and G^{-1/(alpha-1)} concave in lambda, so the root of a tangent of either
// is an upper bound on the answer, from whichever side it is drawn. The search keeps
//   lower: the last point *evaluated* and found feasible (what is returned), and
//   upper: the least tangent root or infeasible point seen.
#pragma once

#include <cmath>

#include "common/config.h"

ADAPMIXED_CORE_BEGIN

// lambda and 1 - lambda, the smaller of the two with full relative accuracy.
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

// The weight is rounded down: 1 - 2e-22 is not 1.
ADAPMIXED_HD Point at_complement(double complement) {
  double weight = 1.0 - complement;
  if (1.0 - weight < complement) weight = std::nextafter(weight, 0.0);
  return {weight, complement};
}

// An upper bound on the point a computed step away. The step's own error, relative to it, would be
// all that is left of a complement that the step nearly cancels.
constexpr double kDoubleStepError = 1e-12;
ADAPMIXED_HD Point shifted(const Point& p, double computed_step, double error = kDoubleStepError) {
  const double step = computed_step + error * std::fabs(computed_step);
  const double weight = p.weight + step;
  if (weight <= 0.0) return {0.0, 1.0};
  if (weight <= 0.5) return at_weight(weight);
  const double complement = p.complement - step;
  return complement <= 0.0 ? Point{1.0, 0.0} : at_complement(complement);
}

// One constraint at one point: value <= 1 when feasible (margin included), and where its tangent
// meets the bound, as a step in lambda; not finite when the sums overflowed.
// Rounding can turn a slope of nearly 0 negative, and large ones overflow; such a tangent says
// nothing (steps stay infinite). log_step is Newton's in -log(1 - lambda): a proposal, no bound.
struct Bound {
  double value = 0.0;
  double step = HUGE_VAL;
  double log_step = HUGE_VAL;
};

// excess: F = 1 + A is given by A; scaled: F / T is given. Both with the matching derivative.
ADAPMIXED_HD Bound forward_bound(double log_gap, double f, double slope, double order) {
  if (!(slope > 0.0 && slope < HUGE_VAL)) return {log_gap, HUGE_VAL, HUGE_VAL};
  return {log_gap, std::expm1(-log_gap / order) * order * f / slope, HUGE_VAL};
}
// Tokens that only p lacks make B, the excess (or G itself if scaled), grow like
// (1-lambda)^{1-alpha}: log B is nearly straight in -log(1-lambda), where a tangent in lambda says
// little. log_ratio: log of B over its bound.
ADAPMIXED_HD Bound reverse_bound(double log_gap, double g, double b, double log_ratio, double slope,
                                 double order, double complement) {
  if (!(slope > 0.0 && slope < HUGE_VAL)) return {log_gap, HUGE_VAL, HUGE_VAL};
  return {log_gap, -std::expm1(log_gap / (order - 1.0)) * (order - 1.0) * g / slope,
          -log_ratio * b / (slope * complement)};
}

// What the constraints are compared with. Rounding errors of r = p/q, relative error `ratio_error`,
// are given back to the safe side: the bound is lowered by more than they can move the sums.
struct Target {
  bool scaled;        // T too large for excess sums: compare F / T with 1
  double log_target;  // (alpha - 1) R
  double excess;      // T - 1 after the margin (excess form)
  double log_margin;  // (scaled form)
};

// From here on all tokens but those with terms near T, at most sum q = 1, are nothing beside it.
constexpr double kScaledFrom = 20.0;

ADAPMIXED_HD Target make_target(double order, double radius, double ratio_error) {
  Target t{};
  t.log_target = (order - 1.0) * radius;
  t.scaled = t.log_target >= kScaledFrom;
  t.log_margin = 1e-8 + 4.0 * order * ratio_error;
  const double excess = std::expm1(std::fmin(t.log_target, kScaledFrom));
  if (excess > 0.0) {
    // |error of A| <= sum q alpha(alpha-1) lambda^2 |d| r eps: by Cauchy-Schwarz at most
    // eps sqrt(2 alpha (alpha-1) (T-1)) for small x, and alpha eps A for large x; last, rounding
    // of 1 + x itself. What is promised of lambda, 1e-5 of the optimum, needs the last two below
    // some 2e-5: hence excess >= 1e-9 alpha for the one, 1e-12 alpha^2 for the other.
    const double margin =
        1e-8 + 4.0 * ratio_error * (order + std::sqrt(2.0 * order * (order - 1.0) / excess)) +
        4e-15 * order / excess;
    t.excess = margin < 1.0 ? excess * (1.0 - margin) : 0.0;
  }
  return t;
}

// How close the search comes to the answer, and how well the sums give tangents' steps; relative.
// As it is: for sums in double.
struct Precision {
  double tolerance = 1e-7, step_error = kDoubleStepError;
};

// The next point to try, a little inside `upper`.
ADAPMIXED_HD Point inside(const Point& upper, double towards_one, double tolerance) {
  if (upper.weight <= 0.5) return at_weight(upper.weight * (1.0 - 0.5 * tolerance));
  if (upper.complement > 0.0) return at_complement(upper.complement * (1.0 + 0.5 * tolerance));
  return at_complement(towards_one);  // lambda = 1 has failed and no tangent says more
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

// evaluate(point, want_forward, want_reverse, Bound& forward, Bound& reverse).
// `upper`: any upper bound on the answer, (1, 0) included; `start`: the first point tried.
ADAPMIXED_HD_CALLBACK
template <class Evaluate>
ADAPMIXED_HD Point largest_weight(const Evaluate& evaluate, double radius, Point start, Point upper,
                                  const Precision& precision) {
  const double tolerance = precision.tolerance;
  Point lower{0.0, 1.0};
  Point forward_holds = lower, reverse_holds = lower;  // each known to hold up to here
  bool one_failed = false;
  int slow = 0;            // tangents drawn where nothing better was known
  Point barren{2.0, 0.0};  // the last infeasible point without a tangent
  // G <= (1-lambda)^{1-alpha} always: the reverse constraint holds wherever 1-lambda >= e^{-R}.
  // (An R that no double's e^{-R} can follow does not make lambda = 1 free.)
  const double reverse_free = std::fmax(std::exp(-radius) * (1.0 + 1e-7), 2.3e-308);
  double towards_one = 0.5 * reverse_free;
  Point x = below(start, upper) ? start : upper;
  for (int trial = 0; trial < 80; ++trial) {
    const bool want_forward = below(forward_holds, x);
    const bool want_reverse = x.complement < reverse_free && below(reverse_holds, x);
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
      // No tangent at an infeasible x: nothing is known but that the answer is below.
      if (!feasible && !(want_forward && std::isfinite(forward.step)) &&
          !(want_reverse && std::isfinite(reverse.step))) {
        barren = x;
      }
      bool halve = trial % 12 == 11 || (upper.complement > 0.0 && !below(upper, barren));
      Point next = inside(upper, towards_one, tolerance);
      if (proposed && x.complement < 0.1) {
        const double near =
            x.complement * std::exp(-std::fmax(reverse.log_step, -700.0)) * (1.0 + 0.5 * tolerance);
        // From the feasible side a tangent that leads elsewhere by far is not to be trusted.
        const double least = reverse_ok ? 4.0 * next.complement : next.complement;
        if (near > least && near < lower.complement) next = at_complement(near);
        // Infeasible, no proposal, and the tangents creep.
        if (!reverse_ok && near >= lower.complement &&
            (upper.complement < 2.0 * x.complement || ++slow == 3)) {
          halve = true;
          slow = 0;
        }
      }
      // Tangents that do not move any more (rounding), or a slow approach: halve the interval.
      x = halve || !below(lower, next) ? middle(lower, upper) : next;
      if (!below(lower, x)) return lower;
    }
  }
  return lower;
}

ADAPMIXED_CORE_END
