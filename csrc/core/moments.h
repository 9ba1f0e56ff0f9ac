// The excess (1+x)^s - 1 - s x as a polynomial: one set of moments sum p x^k serves all orders.
//
// On |x| <= reach, x = reach t, the excess is x^2 times a smooth function, which is replaced with
// its interpolant in t at Chebyshev points. Outside, and for what the interpolation leaves, see the
// callers.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/elementary.h"

ADAPMIXED_CORE_BEGIN

constexpr int kMaxMoments = 16;

// The excess over x^2, s (s - 1) / 2 at x = 0.
ADAPMIXED_HD double excess_over_square(double x, double s) {
  if (std::fabs(x) < 1e-9) return 0.5 * s * (s - 1.0);
  return power(x, log_parts(x, 1.0 + x), s).excess / (x * x);
}

// The square of the excess's derivative, s ((1+x)^{s-1} - 1), over x^2.
ADAPMIXED_HD double squared_slope_over_square(double x, double s) {
  if (std::fabs(x) < 1e-9) return s * (s - 1.0) * s * (s - 1.0);
  const double slope = s * std::expm1((s - 1.0) * std::log1p(x)) / x;
  return slope * slope;
}

// x^2 times an interpolant, as a polynomial in t.
struct SquareTimes {
  double coefficients[kMaxMoments];  // of t^{2+k}
  double error;                      // at most, over t^2

  // sum over k of coefficients[k] moments[k], moments[k] = sum p t^{2+k}; `slope`: the same of x
  // times the derivative.
  ADAPMIXED_HD double sum(const double* moments, int degree, double& slope) const {
    double total = 0.0;
    slope = 0.0;
    for (int k = degree - 1; k >= 0; --k) {
      total += coefficients[k] * moments[k];
      slope += (2.0 + k) * coefficients[k] * moments[k];
    }
    return total;
  }

  // What a relative error `first + step k` of sum p |t|^{2+k} comes to.
  ADAPMIXED_HD double rounding(const double* moments, int degree, double first, double step) const {
    double total = 0.0;
    for (int k = 0; k < degree; ++k) {
      // Odd ones by their even neighbours.
      const double size = k % 2 == 0       ? moments[k]
                          : k + 1 < degree ? std::sqrt(moments[k - 1] * moments[k + 1])
                                           : moments[k - 1];
      total += (first + step * k) * std::fabs(coefficients[k]) * size;
    }
    return total;
  }
};

// Newton's interpolation of f on |x| <= reach at `degree` Chebyshev points, expanded in powers of
// t = x / reach.
template <class Function>
ADAPMIXED_HD SquareTimes fit_square_times(const Function& f, double reach, int degree) {
  double points[kMaxMoments], divided[kMaxMoments];
  for (int j = 0; j < degree; ++j) {
    points[j] = std::cos(3.14159265358979324 * (j + 0.5) / degree);
    divided[j] = f(reach * points[j]);
  }
  for (int order = 1; order < degree; ++order) {
    for (int j = degree - 1; j >= order; --j) {
      divided[j] = (divided[j] - divided[j - 1]) / (points[j] - points[j - order]);
    }
  }
  SquareTimes fit{};
  for (int j = degree - 1; j >= 0; --j) {
    // fit = fit (t - points[j]) + divided[j]
    for (int k = degree - 1; k > 0; --k) {
      fit.coefficients[k] = fit.coefficients[k - 1] - points[j] * fit.coefficients[k];
    }
    fit.coefficients[0] = divided[j] - points[j] * fit.coefficients[0];
  }
  // Between the points, finer than the interpolant's wiggles.
  for (int j = 0; j <= 4 * degree; ++j) {
    const double t = -1.0 + 2.0 * j / (4.0 * degree);
    double value = 0.0;
    for (int k = degree - 1; k >= 0; --k) value = value * t + fit.coefficients[k];
    fit.error = std::fmax(fit.error, std::fabs(value - f(reach * t)));
  }
  fit.error *= 1.3 * reach * reach;
  for (double& c : fit.coefficients) c *= reach * reach;
  return fit;
}

// One direction of one order: its excess, and the square of the excess's derivative by x.
struct ExcessFit {
  SquareTimes excess, squared_slope;
};

ADAPMIXED_HD ExcessFit fit_excess(double s, double reach, int degree) {
  return {
      fit_square_times([s](double x) { return excess_over_square(x, s); }, reach, degree),
      fit_square_times([s](double x) { return squared_slope_over_square(x, s); }, reach, degree)};
}

// How far in order * |x| an interpolant of this degree serves: its error is below 1e-7 of the
// function's value at 0 for all orders up to the largest.
ADAPMIXED_HD double moment_reach(double largest_order, int degree) {
  const double extent = degree <= 4 ? 0.12 : degree <= 6 ? 0.6 : degree <= 10 ? 2.0 : 4.5;
  return std::fmin(extent / (largest_order + 5.0), 0.08 * extent);
}

ADAPMIXED_CORE_END
