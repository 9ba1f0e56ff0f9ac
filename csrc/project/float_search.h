// The largest weight of one row from sums over its tokens in single precision, with a bound on the
// rounding error: for small targets at integer orders.
//
// A row that sums in floats computes d = r - 1 by common/float_ratio.h. It adds up to 32 terms in
// floats, each in at most ten additions, and these sums in double:
//   second_moment(), third_moment(): sum q d^2, sum q d^3;
//   least_excess(): the least d;
//   sums(weight, forward, reverse): A and B of project/formula.h, if wanted, with their slopes.
//
// Rounding. If the weight leaves 1 + weight d above 1/4, sums evaluated at
// weight (1 + kFloatRelative) are at least 1 - float_constant times the exact ones at weight. In
// units (kFloatUnit):
//   relative: 7.6 for x = weight d, from d and the affine map; at most 4 of x or y for a power
//   above 1 of 1 + x or 1 + y, y = -x / (1 + x); 4 for y itself; 1 for the absolute error of d if
//   |d| > 8e-4.
//   constant: 3 for q, 5 for products, 10 for the additions; for a power below 1, whose excess
//   doubles the error with each doubling of the exponent, 1 for each unit of the order; if
//   |d| <= 8e-4, the absolute error of d, relative to an excess of order (order - 1) x^2 / 2.
#pragma once

#include "common/float_ratio.h"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

constexpr double kFloatRelative = 17.0 * kFloatUnit;
ADAPMIXED_HD double float_constant(double order, double excess) {
  const double absolute = kRatioAbsolute * 1e-3 * order * (order - 1.0) / excess;
  return (18.0 + order) * kFloatUnit + absolute;
}

// alpha, R and the quantities derived from them.
class FloatProblem {
 public:
  ADAPMIXED_HD FloatProblem(double order, double radius)
      : order_(order),
        radius_(radius),
        log_target_((order - 1.0) * radius),
        excess_(std::expm1(std::fmin(log_target_, kScaledFrom))),
        listing_(log_target_ >= kScaledFrom) {}

  ADAPMIXED_HD double log_target() const { return log_target_; }
  // Whether the target is one for solve_lists.
  ADAPMIXED_HD bool listing() const { return listing_; }

  // At higher orders, or for a smaller excess T - 1, float rounding is too large a part of the
  // excess.
  ADAPMIXED_HD bool floats_serve() const {
    return !listing_ && integer_order(order_) != 0 && order_ <= 64.0 && excess_ > 1e-4;
  }

  // Returns false if float sums do not decide closely enough.
  ADAPMIXED_HD_CALLBACK
  template <class FloatRow>
  ADAPMIXED_HD bool solve(const FloatRow& row, Point& found) const {
    Target target{};
    target.log_target = log_target_;
    const double constant = float_constant(order_, excess_);
    target.excess = excess_ * (1.0 - constant);
    bool strained = false;
    const auto sums = [&](const Point& x, bool forward, bool reverse) {
      // A relative error of d acts like one of lambda.
      const double weight = x.weight * (1.0 + kFloatRelative);
      if (reverse && !(1.0 + weight * row.least_excess() > 0.25)) strained = true;
      return row.sums(weight, forward, reverse);
    };
    Point start{1.0, 0.0};
    const double guess = moment_guess(row.second_moment(), row.third_moment());
    if (guess < 0.7) start = at_weight(guess * (1.0 - kFloatRelative - 0.6 * constant));
    found = search(sums, target, order_, radius_, start, {1.0, 0.0}, {1e-6, 1e-5});
    return !strained && !delicate(found);
  }

 private:
  // The root in lambda of the first two terms of A; for alpha = 2 and 3 these are all of A.
  ADAPMIXED_HD double moment_guess(double second_moment, double third_moment) const {
    const double second = 0.5 * order_ * (order_ - 1.0) * second_moment;
    const double third = order_ * (order_ - 1.0) * (order_ - 2.0) / 6.0 * third_moment;
    double x = std::sqrt(excess_ / second);
    for (int k = 0; k < 20; ++k) {
      const double value = x * x * (second + third * x) - excess_;
      const double slope = x * (2.0 * second + 3.0 * third * x);
      if (!(slope > 0.0)) return std::sqrt(excess_ / second);
      const double next = x - value / slope;
      if (!(next > 0.0)) return x;
      if (std::fabs(next - x) < 1e-12 * x) return next;
      x = next;
    }
    return x;
  }

  double order_, radius_, log_target_, excess_;
  bool listing_;
};

ADAPMIXED_CORE_END
