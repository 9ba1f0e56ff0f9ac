// The terms of one token in the two constraints of a row (project/formula.h) and in their
// derivatives with respect to lambda: q X^alpha and q X^{1-alpha} with
// X = 1 + lambda d = lambda r + (1 - lambda), r = p/q, d = r - 1.
//
// Excess form: q X^s minus q (1 + s lambda d), which sums to 1 over all tokens. Scaled form, for
// targets T too large for the excess form: q X^s / T.
//
// Templates over T: double, or a SIMD vector of doubles. The wanted sums and the form are constants
// of a vector loop.
#pragma once

#include <cmath>
#include <limits>

#include "common/elementary.h"
#include "common/view.h"
#include "project/formula.h"

ADAPMIXED_CORE_BEGIN

// 1 / ((T/q)^{1/alpha} - 1): q (1 + lambda d)^alpha <= T if lambda d times this is at most 1.
template <class T>
ADAPMIXED_HD T inverse_reach(T log_q, double order, double log_target) {
  const T u = (T(log_target) - log_q) * T(1.0 / order);
  return T(1.0) / vmax(ratio(u).d, T(1e-300));
}

struct Sums {
  double forward = 0.0, forward_slope = 0.0;  // A or F/T, and its derivative
  double reverse = 0.0, reverse_slope = 0.0;
};

// Sums under construction: the slopes still lack their factors alpha and 1 - alpha.
template <class T>
struct TermSums {
  T forward{0.0}, forward_slope{0.0};
  T reverse{0.0}, reverse_slope{0.0};
};

// Terms at any order, by logarithms.
template <class T>
class LogarithmTerms {
 public:
  ADAPMIXED_HD_INLINE LogarithmTerms(const Point& x, double order, double log_target)
      : weight_(x.weight),
        complement_(x.complement),
        forward_power_(order),
        reverse_power_(1.0 - order),
        offset_(log_target) {}

  ADAPMIXED_HD_INLINE void add(bool forward, bool reverse, bool scaled, T q, T log_q, T d, T r,
                               TermSums<T>& s) const {
    const T X = vfma(weight_, r, complement_);
    const T excess_x = weight_ * d;
    const LogParts<T> l = log_parts(excess_x, X);
    const T d_over_X = d / vmax(X, T(std::numeric_limits<double>::min()));
    if (scaled) {
      const T lq = log_q - offset_;
      if (forward) {
        const T term = exp_(vfma(forward_power_, l.log, lq));
        s.forward = s.forward + term;
        s.forward_slope = vfma(term, d_over_X, s.forward_slope);
      }
      if (reverse) {
        const T term = exp_(vfma(reverse_power_, l.log, lq));
        s.reverse = s.reverse + term;
        s.reverse_slope = vfma(term, d_over_X, s.reverse_slope);
      }
      return;
    }
    if (forward) {
      const Power<T> w = power(excess_x, l, forward_power_);
      s.forward = vfma(q, w.excess, s.forward);
      s.forward_slope = vfma(q, vfma(w.value, d_over_X, T(0.0) - d), s.forward_slope);
    }
    if (reverse) {
      const Power<T> w = power(excess_x, l, reverse_power_);
      s.reverse = vfma(q, w.excess, s.reverse);
      // q is multiplied first, because d / X can be large.
      s.reverse_slope = s.reverse_slope + vfma(q * w.value, d_over_X, T(0.0) - q * d);
    }
  }

 private:
  T weight_, complement_, forward_power_, reverse_power_, offset_;
};

// Terms at integer orders, by multiplication. The reverse side is (1+x) c_alpha(y), y = -x/(1+x).
// Scaled sums spread T over the factors; a product above the range of double then means an
// infeasible point.
template <class T>
class MultiplicationTerms {
 public:
  ADAPMIXED_HD_INLINE MultiplicationTerms(const Point& x, double order, int integer,
                                          double log_target)
      : weight_(x.weight),
        complement_(x.complement),
        order_(order),
        forward_scale_(std::exp(-log_target / order)),
        reverse_scale_(std::exp(-log_target / (order - 1.0))),
        k_(integer - 1) {}

  ADAPMIXED_HD_INLINE void add(bool forward, bool reverse, bool scaled, T q, T d, T r,
                               TermSums<T>& s) const {
    const T X = vfma(weight_, r, complement_);
    if (scaled) {
      if (forward) {
        const T factor = X * forward_scale_;
        const T part = q * integer_power(factor, k_);
        s.forward = vfma(part, factor, s.forward);
        s.forward_slope = vfma(part, forward_scale_ * d, s.forward_slope);
      }
      if (reverse) {
        const T inverse = T(1.0) / X;
        const T term = q * integer_power(inverse * reverse_scale_, k_);
        s.reverse = s.reverse + term;
        s.reverse_slope = vfma(term, inverse * d, s.reverse_slope);
      }
      return;
    }
    const T excess_x = weight_ * d;
    if (forward) {
      const Chain<T> w = chain(excess_x, k_);
      s.forward = vfma(q, vfma(w.e, excess_x, w.c), s.forward);
      s.forward_slope = vfma(q * d, w.e, s.forward_slope);
    }
    if (reverse) {
      const T y = T(0.0) - excess_x / X;
      const Chain<T> w = chain(y, k_);
      const T c = vfma(w.e, y, w.c);
      s.reverse = vfma(q * X, c, s.reverse);
      s.reverse_slope = vfma(q * d, vfma(order_, y, c), s.reverse_slope);
    }
  }

 private:
  T weight_, complement_, order_, forward_scale_, reverse_scale_;
  int k_;
};

// In X c_alpha(y), c_alpha may overflow although X^{1-alpha} does not, but only for such a small
// complement. Then the sums of LogarithmTerms serve.
ADAPMIXED_HD bool overflowed(const Point& x, const Sums& s) {
  return x.complement > 0.0 && x.complement < 1e-30 && !std::isfinite(s.reverse + s.reverse_slope);
}

// Functions of a wild token, by its log q and t = log r.

// If this is false, X^alpha and X^{1-alpha} are at most e^600, which q < e^-680 makes negligible.
ADAPMIXED_HD bool wild_counts(double t, double order) {
  return std::fabs(t) > 1.0 || order * std::fabs(t) > 600.0;
}

// log |e^t - 1|.
ADAPMIXED_HD double log_size_of_excess(double t) {
  return std::fmax(t, 0.0) + std::log(-std::expm1(-std::fabs(t)));
}

// The log of a bound on lambda for t > 0, from q (1 + lambda d)^alpha <= T.
ADAPMIXED_HD double wild_log_reach(double log_q, double t, double order, double log_target) {
  return log_size_of_excess((log_target - log_q) / order) - log_size_of_excess(t);
}

// F >= q_v (1 + lambda d_v)^alpha for each v alone, so every token gives an upper bound on lambda.
// steepest: the largest d times inverse_reach. wild_log_reach: the least one, or +inf if there is
// none.
ADAPMIXED_HD Point upper_bound(double steepest, double wild_log_reach) {
  const double weight =
      std::fmin(steepest > 1.0 ? 1.0 / steepest : 1.0, std::exp(std::fmin(0.0, wild_log_reach)));
  return weight < 1.0 ? shifted({0.0, 1.0}, weight) : Point{1.0, 0.0};
}

// Adds a wild token. Unlike in TermSums, the slopes have their factors.
ADAPMIXED_HD void add_wild(const Point& x, double order, bool scaled, double log_target,
                           double log_q, double t, Sums& s) {
  const double offset = scaled ? log_target : 0.0;
  // A large order multiplies the error of log X.
  const double log_X = std::fabs(t) <= 1.0
                           ? std::log1p(x.weight * std::expm1(t))
                           : log_add(std::log(x.weight) + t, std::log(x.complement));
  const double log_d = log_size_of_excess(t);
  const double sign = t > 0.0 ? 1.0 : -1.0;
  const double forward = log_q + order * log_X - offset;
  const double reverse = log_q + (1.0 - order) * log_X - offset;
  // In excess form the linear term is subtracted; the token's q itself is far below rounding.
  const double p = scaled ? 0.0 : std::exp(log_q + t);
  s.forward += std::exp(forward) - order * x.weight * p;
  s.forward_slope += order * (sign * std::exp(forward + log_d - log_X) - p);
  s.reverse += std::exp(reverse) + (order - 1.0) * x.weight * p;
  s.reverse_slope -= (order - 1.0) * (sign * std::exp(reverse + log_d - log_X) - p);
}

ADAPMIXED_CORE_END
