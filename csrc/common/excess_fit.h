// The excess (1+x)^s - 1 - s x as a polynomial, so that one set of moments sum p x^k serves all
// orders.
//
// On |x| <= reach, with x = reach t, the excess is x^2 times a smooth function, which is replaced
// with its interpolant in t at Chebyshev points. The callers handle larger |x| and the
// interpolation error.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/elementary.h"
#include "common/operators.h"

ADAPMIXED_CORE_BEGIN

constexpr int kMaxMoments = 16;

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

// The interpolant of f on |x| <= reach, times x^2.
template <class Function>
SquareTimes fit_square_times(const Function& f, double reach, int degree) {
  double points[kMaxMoments] = {}, values[kMaxMoments] = {};
  for (int j = 0; j < degree; ++j) {
    points[j] = std::cos(3.14159265358979324 * (j + 0.5) / degree);
    values[j] = f(reach * points[j]);
  }
  // Newton's interpolation, expanded in powers of t.
  for (int order = 1; order < degree; ++order) {
    for (int j = degree - 1; j >= order; --j) {
      values[j] = (values[j] - values[j - 1]) / (points[j] - points[j - order]);
    }
  }
  SquareTimes fit{};
  double* coefficients = fit.coefficients;
  for (int j = degree - 1; j >= 0; --j) {
    // coefficients = coefficients (t - points[j]) + values[j]
    for (int k = degree - 1; k > 0; --k) {
      coefficients[k] = coefficients[k - 1] - points[j] * coefficients[k];
    }
    coefficients[0] = values[j] - points[j] * coefficients[0];
  }
  // The error is measured at probes between the points, finer than the interpolant oscillates.
  for (int j = 0; j <= 4 * degree; ++j) {
    const double t = -1.0 + 2.0 * j / (4.0 * degree);
    double value = 0.0;
    for (int k = degree - 1; k >= 0; --k) value = value * t + coefficients[k];
    fit.error = std::fmax(fit.error, std::fabs(value - f(reach * t)));
  }
  fit.error *= 1.3 * reach * reach;
  for (int k = 0; k < degree; ++k) coefficients[k] *= reach * reach;
  return fit;
}

// One direction of one order: its excess and, for the losses' bound, the square of its derivative,
// s ((1+x)^{s-1} - 1), which is within `bend` t^2 of s (s-1) x.
struct ExcessFit {
  SquareTimes excess, squared_slope;
  double bend;
};

inline ExcessFit fit_excess(double s, double reach, int degree) {
  const auto excess = [s](double x) {
    if (std::fabs(x) < 1e-9) return 0.5 * s * (s - 1.0);
    return power(x, log_parts(x, 1.0 + x), s).excess / (x * x);
  };
  const auto squared_slope = [s](double x) {
    if (std::fabs(x) < 1e-9) return s * (s - 1.0) * s * (s - 1.0);
    const double slope = s * std::expm1((s - 1.0) * std::log1p(x)) / x;
    return slope * slope;
  };
  const auto bend = [s](double x) {
    return std::fabs(s * power(x, log_parts(x, 1.0 + x), s - 1.0).excess);
  };
  return {fit_square_times(excess, reach, degree), fit_square_times(squared_slope, reach, degree),
          std::fmax(bend(-reach), bend(reach))};
}

// The degree of interpolants, its index among the degrees that there are, and the largest |x| for
// which they serve: their error is below 1e-7 of the function's value at 0 for all orders up to the
// largest. `extent` is in units of order * |x|.
struct MomentChoice {
  int index, degree;
  double reach;
};
constexpr int kDegrees = 4;
ADAPMIXED_HD MomentChoice moments_at(int index, double largest_order) {
  const int degree = index == 0 ? 4 : index == 1 ? 6 : index == 2 ? 10 : kMaxMoments;
  const double extent = index == 0 ? 0.12 : index == 1 ? 0.6 : index == 2 ? 2.35 : 4.7;
  return {index, degree, std::fmin(extent / (largest_order + 5.0), 0.08 * extent)};
}

// The least degree that serves all |x| up to `wanted`; the largest degree if none does.
ADAPMIXED_HD MomentChoice choose_moments(double largest_order, double wanted) {
  MomentChoice choice = moments_at(0, largest_order);
  while (choice.index + 1 < kDegrees && choice.reach < wanted) {
    choice = moments_at(choice.index + 1, largest_order);
  }
  return choice;
}

ADAPMIXED_HD double largest_of(const double* orders, std::int64_t count) {
  double largest = 1.0;
  for (std::int64_t k = 0; k < count; ++k) largest = std::fmax(largest, orders[k]);
  return largest;
}

// The interpolants of one call, which depend on the orders alone; of both directions.
template <int kOrders>
struct ExcessFits {
  ExcessFit of[kOrders][kDegrees][2];
};

// Returns the interpolants of these orders, which are kept until this thread asks for others.
template <int kOrders = kMaxOrders>
const ExcessFits<kOrders>& fits_of(const double* orders, std::int64_t count) {
  thread_local ExcessFits<kOrders> fits;
  thread_local double known[kOrders];
  thread_local std::int64_t size = 0;
  const bool same = size == count && std::equal(orders, orders + count, known);
  if (same || count == 0) return fits;
  const double largest = largest_of(orders, count);
  for (std::int64_t k = 0; k < count; ++k) {
    known[k] = orders[k];
    for (int index = 0; index < kDegrees; ++index) {
      const MomentChoice at = moments_at(index, largest);
      fits.of[k][index][0] = fit_excess(orders[k], at.reach, at.degree);
      fits.of[k][index][1] = fit_excess(1.0 - orders[k], at.reach, at.degree);
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

ADAPMIXED_CORE_END
