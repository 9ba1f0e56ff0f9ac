// One token of the leave-one-out sums, relative to the public distribution, for every back end.
//
// With Y_i = p_bar_i / q and S = sum_i Y_i (absent slots count Y = 1), p = q S / N and
// p' = p (1 + x_i), where
//   add/remove: 1 + x_i = (S - Y_i) N / (S (N - 1)),   zero-out: 1 + x_i = (S - Y_i + 1) / S.
// Both directions sum the excess p((1+x)^s - 1 - s x) for s = alpha and s = 1 - alpha; its linear
// part vanishes in the sum. Templates over T as in common/elementary.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "common/projected.h"

ADAPMIXED_CORE_BEGIN

template <class T>
using MaskOf = decltype(std::declval<T>() < std::declval<T>());

// The neighbouring mixtures of one call, the same for all tokens.
struct Neighbours {
  double slots, absent;  // N, and how many of these answer q
  bool alone;            // there is one slot, and nothing is left without it
  bool against_public;   // without the model q answers: for it, or because nothing is left
  double largest_order;
};

ADAPMIXED_HD double largest_of(const double* orders, std::int64_t count) {
  double largest = 1.0;
  for (std::int64_t k = 0; k < count; ++k) largest = std::fmax(largest, orders[k]);
  return largest;
}

ADAPMIXED_HD Neighbours neighbours_of(const Shape& shape, const LeaveOneOutOptions& options) {
  Neighbours all{};
  all.slots = static_cast<double>(options.num_models);
  all.absent = all.slots - static_cast<double>(shape.models);
  all.alone = options.num_models == 1;
  all.against_public = options.zero_out || all.alone;
  all.largest_order = largest_of(options.orders, options.num_orders);
  return all;
}

// The numbers that all models share at one token.
template <class T>
struct MixtureToken {
  T p;                // the mixture
  T total;            // N p / q
  Projected<T> mean;  // p / q - 1 and p / q
  T scale;            // x per unit of the difference between mean and model
};

// `rare`: the mixture is 0 or near the end of the range of double. Then p = 0 here.
template <class T>
ADAPMIXED_HD_INLINE MixtureToken<T> mixture_token(const Neighbours& all, T q,
                                                  const Projected<T>& mean, MaskOf<T>& rare) {
  const T total = mean.ratio * T(all.slots);
  rare = (q > T(0.0)) & ((mean.ratio < T(1e-280)) | (q * mean.ratio < T(1e-290)));
  return {vselect(rare, T(0.0), q * mean.ratio), total, mean,
          all.against_public ? T(-1.0) / total : T(1.0 / (all.slots - 1.0)) / mean.ratio};
}

// p' of one model at one token: x = p'/p - 1 and X = 1 + x.
template <class T>
struct NeighbourToken {
  T x, X;
};

// `dominated`: one model makes up nearly all of the mixture and S - Y_i cancels. X must then be
// computed from the others' sum by ratio_from_rest. Below that X has ten times the error of S.
template <class T>
ADAPMIXED_HD_INLINE NeighbourToken<T> neighbour_token(const Neighbours& all,
                                                      const MixtureToken<T>& token,
                                                      const Projected<T>& own,
                                                      MaskOf<T>& dominated) {
  T x = own.excess;
  if (!all.against_public) {
    // If p is near q, differences of p_bar / q - 1 are exact; if p << q, differences of p_bar / q
    // are.
    x = vselect(token.mean.ratio >= T(0.5), token.mean.excess - own.excess,
                token.mean.ratio - own.ratio);
  }
  x = x * token.scale;
  dominated = own.ratio > (all.alone ? T(HUGE_VAL) : T(0.9) * token.total);
  return {x, all.alone ? T(1.0) / token.total : x + T(1.0)};
}

// X from the sum of the other models' p_bar / q, including absent slots.
template <class T>
ADAPMIXED_HD_INLINE T ratio_from_rest(const Neighbours& all, T rest, T total) {
  return all.against_public ? (rest + T(1.0)) / total
                            : rest * T(all.slots / (all.slots - 1.0)) / total;
}

// A larger |sum of p_bar_i - q|, or |sum of q - 1|, shows that the projection belongs to other
// rows.
constexpr double kMostBalance = 1e-5;

// D<->_alpha = log1p(max(A, B)) / (alpha - 1). NaN gives +inf, because the loss may not be small.
ADAPMIXED_HD double divergence_from_excess(double forward, double reverse, double order) {
  if (std::isnan(forward) || std::isnan(reverse)) return HUGE_VAL;
  const double excess = std::fmax(std::fmax(forward, reverse), 0.0);
  return std::log1p(excess) / (order - 1.0);
}

// The excess (1+x)^s - 1 - s x as a polynomial, so that one set of moments sum p x^k serves all
// orders.
//
// On |x| <= reach, with x = reach t, the excess is x^2 times a smooth function, which is replaced
// with its interpolant in t at Chebyshev points. The callers handle larger |x| and the
// interpolation error.

constexpr int kMaxMoments = 16;

// The excess divided by x^2; s (s - 1) / 2 at x = 0.
ADAPMIXED_HD double excess_over_square(double x, double s) {
  if (std::fabs(x) < 1e-9) return 0.5 * s * (s - 1.0);
  return power(x, log_parts(x, 1.0 + x), s).excess / (x * x);
}

// The square of the excess's derivative, s ((1+x)^{s-1} - 1), divided by x^2.
ADAPMIXED_HD double squared_slope_over_square(double x, double s) {
  if (std::fabs(x) < 1e-9) return s * (s - 1.0) * s * (s - 1.0);
  const double slope = s * std::expm1((s - 1.0) * std::log1p(x)) / x;
  return slope * slope;
}

// x^2 times an interpolant, as a polynomial in t.
struct SquareTimes {
  double coefficients[kMaxMoments];  // of t^{2+k}
  double error;                      // a bound on the error, divided by t^2

  // The sum over k of coefficients[k] moments[k], with moments[k] = sum p t^{2+k}. `slope`: the
  // same for x times the derivative.
  template <class Moments>
  ADAPMIXED_HD double sum(const Moments& moments, int degree, double& slope) const {
    double total = 0.0;
    slope = 0.0;
    for (int k = degree - 1; k >= 0; --k) {
      total += coefficients[k] * moments[k];
      slope += (2.0 + k) * coefficients[k] * moments[k];
    }
    return total;
  }

  // The error of sum() if sum p |t|^{2+k} has the relative error first + step k.
  template <class Moments>
  ADAPMIXED_HD double rounding(const Moments& moments, int degree, double first,
                               double step) const {
    double total = 0.0;
    for (int k = 0; k < degree; ++k) {
      // An odd moment is replaced by a bound from its even neighbours.
      const double size = k % 2 == 0       ? moments[k]
                          : k + 1 < degree ? std::sqrt(moments[k - 1] * moments[k + 1])
                                           : moments[k - 1];
      total += (first + step * k) * std::fabs(coefficients[k]) * size;
    }
    return total;
  }
};

// Chebyshev point j of `degree`, in t.
ADAPMIXED_HD double chebyshev_point(int j, int degree) {
  return std::cos(3.14159265358979324 * (j + 0.5) / degree);
}

// Newton's interpolation of the values at the points, expanded in powers of t. Overwrites the
// values.
ADAPMIXED_HD void interpolate(const double* points, double* values, int degree,
                              double* coefficients) {
  for (int j = 0; j < degree; ++j) coefficients[j] = 0.0;
  for (int order = 1; order < degree; ++order) {
    for (int j = degree - 1; j >= order; --j) {
      values[j] = (values[j] - values[j - 1]) / (points[j] - points[j - order]);
    }
  }
  for (int j = degree - 1; j >= 0; --j) {
    // coefficients = coefficients (t - points[j]) + values[j]
    for (int k = degree - 1; k > 0; --k) {
      coefficients[k] = coefficients[k - 1] - points[j] * coefficients[k];
    }
    coefficients[0] = values[j] - points[j] * coefficients[0];
  }
}

// Probes between the points, finer than the interpolant oscillates, at which its error is measured.
ADAPMIXED_HD int probe_count(int degree) { return 4 * degree + 1; }
ADAPMIXED_HD double probe(int j, int degree) { return -1.0 + 2.0 * j / (4.0 * degree); }
ADAPMIXED_HD double interpolated(const double* coefficients, int degree, double t) {
  double value = 0.0;
  for (int k = degree - 1; k >= 0; --k) value = value * t + coefficients[k];
  return value;
}

// The interpolant of f on |x| <= reach, times x^2.
template <class Function>
ADAPMIXED_HD SquareTimes fit_square_times(const Function& f, double reach, int degree) {
  double points[kMaxMoments] = {}, values[kMaxMoments] = {};
  for (int j = 0; j < degree; ++j) {
    points[j] = chebyshev_point(j, degree);
    values[j] = f(reach * points[j]);
  }
  SquareTimes fit{};
  interpolate(points, values, degree, fit.coefficients);
  for (int j = 0; j < probe_count(degree); ++j) {
    const double t = probe(j, degree);
    const double error = std::fabs(interpolated(fit.coefficients, degree, t) - f(reach * t));
    fit.error = std::fmax(fit.error, error);
  }
  fit.error *= 1.3 * reach * reach;
  for (int k = 0; k < degree; ++k) fit.coefficients[k] *= reach * reach;
  return fit;
}

// One direction of one order: its excess, and the square of the excess's derivative with respect to
// x, of which only the bound makes use.
struct ExcessFit {
  SquareTimes excess, squared_slope;
};

ADAPMIXED_HD ExcessFit fit_excess(double s, double reach, int degree) {
  return {
      fit_square_times([s](double x) { return excess_over_square(x, s); }, reach, degree),
      fit_square_times([s](double x) { return squared_slope_over_square(x, s); }, reach, degree)};
}

// The largest |x| for which an interpolant of this degree serves: its error is below 1e-7 of the
// function's value at 0 for all orders up to the largest. `extent` is in units of order * |x|.
ADAPMIXED_HD double moment_reach(double largest_order, int degree) {
  const double extent = degree <= 4 ? 0.12 : degree <= 6 ? 0.6 : degree <= 10 ? 2.35 : 4.7;
  return std::fmin(extent / (largest_order + 5.0), 0.08 * extent);
}

// The degrees of interpolants.
constexpr int kDegrees = 4;
ADAPMIXED_HD int degree_at(int index) {
  return index == 0 ? 4 : index == 1 ? 6 : index == 2 ? 10 : kMaxMoments;
}

// The interpolants of one call, which depend on the orders alone; of both directions.
template <int kOrders>
struct LossFits {
  ExcessFit of[kOrders][kDegrees][2];
};

// Returns the interpolants of these orders, which are kept until this thread asks for others.
inline const LossFits<kMaxOrders>& fits_of(const double* orders, std::int64_t count) {
  thread_local LossFits<kMaxOrders> fits;
  thread_local double known[kMaxOrders];
  thread_local std::int64_t size = 0;
  const bool same = size == count && std::equal(orders, orders + count, known);
  if (same || count == 0) return fits;
  const double largest = largest_of(orders, count);
  for (std::int64_t k = 0; k < count; ++k) {
    known[k] = orders[k];
    for (int index = 0; index < kDegrees; ++index) {
      const int degree = degree_at(index);
      const double reach = moment_reach(largest, degree);
      fits.of[k][index][0] = fit_excess(orders[k], reach, degree);
      fits.of[k][index][1] = fit_excess(1.0 - orders[k], reach, degree);
    }
  }
  size = count;
  return fits;
}

// Calls f with a degree that is known at compile time.
ADAPMIXED_HD_CALLBACK
template <class F>
ADAPMIXED_HD void with_degree(int degree, const F& f) {
  if (degree == 4) return f(std::integral_constant<int, 4>{});
  if (degree == 6) return f(std::integral_constant<int, 6>{});
  if (degree == 10) return f(std::integral_constant<int, 10>{});
  f(std::integral_constant<int, kMaxMoments>{});
}

// The index of a degree such that few x lie beyond its reach, because those are listed one by one.
// |x| is about weight / slots times |r - 1|.
ADAPMIXED_HD int loss_degree(const Neighbours& all, double largest_weight) {
  const double wanted = (0.5 + 5.0 * largest_weight) / all.slots;
  int index = 0;
  while (index + 1 < kDegrees && moment_reach(all.largest_order, degree_at(index)) < wanted) {
    ++index;
  }
  return index;
}

ADAPMIXED_CORE_END
