// The excess (1+x)^s - 1 - s x as a polynomial, so that one set of moments sum p x^k serves all
// orders.
//
// On |x| <= reach, with x = reach t, the excess is x^2 times a smooth function, which is replaced
// with its interpolant in t at Chebyshev points. The callers handle larger |x| and the
// interpolation error.
#pragma once

#include <cmath>
#include <cstdint>

#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

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

// x^2 times an interpolant, as a polynomial in t: a view of its coefficients.
template <class T>
struct SquareTimesView {
  const T* coefficients;  // of t^{2+k}
  double error;           // a bound on the error, divided by t^2

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
      total += (first + step * k) * std::fabs(static_cast<double>(coefficients[k])) * size;
    }
    return total;
  }
};

// The same with its coefficients.
struct SquareTimes {
  double coefficients[kMaxMoments];
  double error;

  // Turns the coefficients and the largest observed error of an interpolant into those of x^2 times
  // the interpolant, in powers of t.
  ADAPMIXED_HD void set_scale(double reach, int degree) {
    error *= 1.3 * reach * reach;
    for (int k = 0; k < degree; ++k) coefficients[k] *= reach * reach;
  }

  ADAPMIXED_HD SquareTimesView<double> view() const { return {coefficients, error}; }
  template <class Moments>
  ADAPMIXED_HD double sum(const Moments& moments, int degree, double& slope) const {
    return view().sum(moments, degree, slope);
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
  fit.set_scale(reach, degree);
  return fit;
}

// One direction of one order: its excess, and the square of the excess's derivative with respect to
// x, of which only the bound makes use.
template <class T>
struct ExcessFitView {
  SquareTimesView<double> excess;
  SquareTimesView<T> squared_slope;
};
struct ExcessFit {
  SquareTimes excess, squared_slope;
  ADAPMIXED_HD ExcessFitView<double> view() const { return {excess.view(), squared_slope.view()}; }
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

// The degrees of the interpolants of a leave-one-out call, and the sums to which they are applied.
constexpr int kDegrees = 4;
ADAPMIXED_HD int degree_at(int index) {
  return index == 0 ? 4 : index == 1 ? 6 : index == 2 ? 10 : kMaxMoments;
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
