// The largest weight lambda in [0, 1] of one row with E_alpha, E_{1-alpha} <= T - 1, where
//   E_s(lambda) = sum_v q (X^s - 1 - s lambda d),  X = 1 + lambda d,  d = p/q - 1,
//   T = e^{(alpha-1) R},
// from the sums at a few points. E_s + 1 is F (s = alpha) or G (s = 1 - alpha) of the paper.
//
// Let E(t) be E_s(lambda (1 + t)) and u = lambda d / X, so that X(t) = X (1 + t u). Then
//   E''(t) = s (s-1) sum q X(t)^{s-2} (lambda d)^2 <= E''(0) max_v (1 + t u)^{s-2},
// and Taylor's formula with Lagrange's remainder bounds E at points where it was never computed:
// the answer is the largest lambda (1 + t) that this bound admits (`certified`).
//
// F^{1/alpha} is convex and G^{-1/(alpha-1)} concave in lambda, so the root of a tangent of either
// is an upper bound on the answer, on whichever side of it the tangent is drawn. The search stops
// when the two are near each other.
#pragma once

#include <cmath>

#include "common/float_ratio.h"

ADAPMIXED_CORE_BEGIN

// One of the two sums at one lambda: E, or (E + 1) / T in scaled form, and its first and second
// derivative in t, for |t| small. error: a bound on the rounding error of the value.
struct SumAt {
  double value = 0.0, slope = 0.0, curvature = 0.0, error = 0.0;
};
struct SumsAt {
  SumAt forward, reverse;
  double least_u = 0.0;  // not above the least u
};

// From this log T on, sums are scaled: tokens with terms far below T are left out.
constexpr double kScaledLogTarget = 12.0;
// What terms above q / T of these tokens may add to the sums over T; the others add up to 1 / T.
constexpr double kLeftOut = 1e-5;
// The largest weight below 1: with it, single precision tells X from 0.
constexpr double kMostWeight = 1.0 - 4e-6;
// The search ends with a weight this near to an upper bound on the optimum. This and the numbers in
// largest_weight and first_weight change how near the result comes, and never whether it holds.
constexpr double kCloseness = 5e-5;
// The relative error that slopes and curvatures may have. Where they are farther off (tokens with X
// near 0 in F), G decides.
constexpr double kSlopeError = 3e-4;

// Divergences grow with the order, so a larger one is on the safe side; floats tell none below this
// from 1 well enough.
constexpr double kLeastOrder = 1.001;

struct ProjectTarget {
  double order, radius;
  double log_target;  // log T
  bool scaled;
  double limit;  // of SumAt: T - 1, or 1 but for what is left out

  ADAPMIXED_HD ProjectTarget(double alpha, double r)
      : order(alpha > kLeastOrder ? alpha : kLeastOrder),
        radius(r),
        log_target((order - 1.0) * r),
        scaled(log_target >= kScaledLogTarget),
        limit(scaled ? 1.0 - kLeftOut - std::exp(-log_target) : std::expm1(log_target)) {}
};

// On a GPU, numbers that only propose the next point are floats: powers and logarithms in double
// would take longer than the sums. power_above: x^y, or a little more.
#if defined(__CUDACC__) || defined(ADAPMIXED_SIMT)
using Proposal = float;
ADAPMIXED_HD double power_above(double x, double y) {
  return 1.0002 * near_exp2(static_cast<float>(y) * near_log2(static_cast<float>(x)));
}
#else
using Proposal = double;
ADAPMIXED_HD double power_above(double x, double y) { return std::pow(x, y); }
#endif

// Terms may grow by no more than this: those that were too small for floats stay negligible.
constexpr double kMostGrowth = 1e15;

// The largest t that the bound on E(t) admits, but for a few steps' accuracy, found from the right
// by Newton's method: the bound is convex. -1 if there is none near 0.
ADAPMIXED_HD double certified(const SumAt& at, double s, double limit, double least_u) {
  const double room = limit - at.value - at.error;
  const double none = room >= 0.0 ? 0.0 : -1.0;
  if (!(at.slope > 0.0)) return none;
  double t = std::fmin(room / at.slope, 10.0);
  for (int k = 0; k < 12; ++k) {
    const double low = 1.0 + t * least_u, high = 1.0 + t;
    double down = 0.5 * std::fabs(t);  // where there is no bound
    const bool known = low > 0.0 && high > 0.0;
    const double growth =
        known ? std::fmax(power_above(low, s - 2.0), power_above(high, s - 2.0)) : HUGE_VAL;
    if (growth < kMostGrowth) {
      const double bend = (1.0 + kSlopeError) * at.curvature * t * std::fmax(growth, 1.0);
      const double linear = at.slope * t + std::fabs(at.slope * t) * kSlopeError;
      const double over = linear + 0.5 * bend * t - room;
      if (over <= 0.0) return t;
      if (over < HUGE_VAL) down = 1.01 * over / (at.slope + bend);
    }
    if (!(down > 0.0) || (room < 0.0 && !(t - down > -0.5))) return none;
    t = room >= 0.0 ? std::fmax(t - down, 0.0) : t - down;
  }
  return none;
}

// Where E(t) meets the limit: by its tangent (`bound`, too small by rounding alone), and by its
// second derivative (`guess`).
struct Root {
  Proposal bound, guess;
};
ADAPMIXED_HD Root root(const SumAt& at, double s, const ProjectTarget& target) {
  const double base = target.scaled ? 0.0 : 1.0, whole = base + at.value;
  const Proposal ratio = (base + target.limit) / whole, room = (target.limit - at.value) / whole;
  const Proposal gap = ratio > Proposal(0.5) ? std::log1p(room) : std::log(ratio);
  const Proposal m = 1.0 / s;  // of F^{1/alpha} and G^{1/(1-alpha)}
  const Proposal first = at.slope / whole, second = at.curvature / whole;
  const Proposal rise = std::expm1(m * gap), h1 = m * first;
  const Proposal h2 = m * second + m * (m - 1) * first * first;
  Root found{rise / h1, rise / h1};
  Proposal more = h1 * h1 + 2 * h2 * rise;
  if (more > 0) found.guess = 2 * rise / (h1 + std::copysign(std::sqrt(more), h1));
  if (!target.scaled && target.limit < 2.0 && at.value > 0.0 && at.value < 4.0) {
    // log E is nearly straight in log lambda.
    const Proposal k1 = at.slope / at.value;
    const Proposal k2 = (at.slope + at.curvature) / at.value - k1 * k1;
    const Proposal log_ratio = std::log(static_cast<Proposal>(target.limit / at.value));
    more = k1 * k1 + 2 * k2 * log_ratio;
    const Proposal y = more > 0 ? 2 * log_ratio / (k1 + std::sqrt(more)) : log_ratio / k1;
    found.guess = std::expm1(std::fmin(std::fmax(y, Proposal(-20)), Proposal(3)));
  }
  return found;
}

// sum q d^2, sum q d^3 and sum q d^4.
struct Moments {
  double second, third, fourth;
};

// Where E would meet the limit if all that the third and fourth moment of d know were due to one
// token, and the rest of the second one to small d.
ADAPMIXED_HD double first_weight(const Moments& moments, const ProjectTarget& target) {
  const Proposal d = moments.fourth / moments.third, q = moments.third / d / d / d;
  const Proposal bulk = std::fmax(moments.second - q * d * d, 0.0), limit = target.limit;
  Proposal least = 1;
  for (int side = 0; side < 2; ++side) {
    const Proposal s = side == 0 ? target.order : 1.0 - target.order;
    const Proposal two = s * (s - 1) * bulk / 2;
    Proposal x = std::sqrt(limit / two);
    const Proposal reach = (std::pow((1 + limit) / q, 1 / s) - 1) / d;
    if (reach > 0 && !(x < reach)) x = reach;
    // Newton's steps for log E as a function of log x.
    for (int k = 0; k < 8 && x > 0; ++k) {
      const Proposal X = 1 + x * d, power = std::pow(X, s);
      const Proposal value = two * x * x + q * (power - 1 - s * x * d);
      const Proposal slope = 2 * two * x * x + q * s * x * d * (power / X - 1);
      const Proposal step = std::log(limit / value) * value / slope;
      if (!(std::fabs(step) < 5)) break;
      x *= std::exp(step);
      if (std::fabs(step) < Proposal(1e-3)) break;
    }
    if (x < least) least = x;
  }
  return least > 0 ? least : 1e-9;
}

// Which of the two constraints a search is for.
enum class Sides { kBoth, kForward, kReverse };

// G <= (1-lambda)^{1-alpha} always, so that E_{1-alpha} holds up to here.
ADAPMIXED_HD double reverse_free(double radius) { return -std::expm1(-radius) * (1.0 - 1e-7); }

// Half way, as small weights and small complements differ by factors.
ADAPMIXED_HD double middle(double lower, double upper) {
  const double odds = std::sqrt(lower / (1.0 - lower)) * std::sqrt(upper / (1.0 - upper));
  return odds < HUGE_VAL ? odds / (1.0 + odds) : kMostWeight;
}

// The largest weight up to `most`, from sums(lambda, want_forward, want_reverse). start: the first
// lambda tried.
ADAPMIXED_HD_CALLBACK
template <class Sums>
ADAPMIXED_HD double largest_weight(const Sums& sums, const ProjectTarget& target, Sides sides,
                                   double start, double most) {
  if (!(target.limit > 0.0)) return 0.0;  // floats do not tell whether p is q itself
  const double free = reverse_free(target.radius);
  double lower = 0.0, upper = most;
  // The least weight whose sums overflow; sums with NaN count as such, so that p/q beyond the range
  // of floats gives weight 0.
  double barren = HUGE_VAL;
  double x = start;
  for (int trial = 0; trial < 40; ++trial) {
    const bool forward = sides != Sides::kReverse;
    const bool reverse = sides == Sides::kReverse || (sides == Sides::kBoth && x > free);
    const SumsAt at = sums(x, forward, reverse);
    double admitted = HUGE_VAL, guess = HUGE_VAL, bound = HUGE_VAL, blur = 0.0;
    bool overflow = false;
    const auto look = [&](const SumAt& one, double s) {
      if (!(one.value + one.slope + one.curvature < HUGE_VAL)) {
        overflow = true;
        return;
      }
      admitted = std::fmin(admitted, certified(one, s, target.limit, at.least_u));
      if (!(one.slope > 0.0)) return;
      const Root met = root(one, s, target);
      const bool near = std::fabs(met.guess) < 1e-3 && one.value > 0.5 * target.limit;
      if (near) blur = std::fmax(blur, one.error / one.slope);
      guess = std::fmin(guess, static_cast<double>(met.guess));
      // Terms near the least float are rounded too roughly for an upper bound.
      if (one.value > 1e-30) bound = std::fmin(bound, static_cast<double>(met.bound));
    };
    if (forward) look(at.forward, target.order);
    if (reverse) look(at.reverse, 1.0 - target.order);
    if (overflow) {
      upper = barren = std::fmin(upper, x);
    } else {
      if (x == most && admitted >= 0.0) return most;
      double candidate = x * (1.0 + std::fmin(admitted, 10.0));
      if (sides == Sides::kBoth && !reverse) candidate = std::fmin(candidate, free);
      lower = std::fmax(lower, std::fmin(candidate, std::fmin(most, kMostWeight)));
      upper = std::fmin(upper, x * (1.0 + bound + 4e-6 * std::fmax(1.0, std::fabs(bound))));
    }
    if (x == 1.0) upper = std::fmin(upper, kMostWeight);
    // Near a root the errors of the sums keep the two apart by `blur`.
    if (lower >= upper * (1.0 - kCloseness - 1.1 * blur)) return lower;
    double next = std::fmin(x * (1.0 + guess), upper);
    if (!(next > lower) || next >= barren || std::fabs(next / x - 1.0) < 1e-7 || trial % 8 == 7) {
      next = middle(std::fmax(lower, 1e-3 * upper), upper);
    }
    x = next;
  }
  return lower;
}

ADAPMIXED_CORE_END
