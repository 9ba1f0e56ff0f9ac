// exp and log1p in double. Their *excess*, the remainder after the linear term, is accurate
// relative to itself.
//
// Templates over T: double, or a SIMD vector of doubles with the same operations (common/simd.h).
// Error: about 1 ulp for exp and log. The excess functions keep their relative accuracy as
// |u| -> 0.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "common/config.h"

ADAPMIXED_CORE_BEGIN

// What the mathematics needs of its element type, for plain double.
ADAPMIXED_HD double vfma(double a, double b, double c) { return std::fma(a, b, c); }
ADAPMIXED_HD double vmin(double a, double b) { return a < b ? a : b; }
ADAPMIXED_HD double vmax(double a, double b) { return a > b ? a : b; }
ADAPMIXED_HD double vabs(double a) { return std::fabs(a); }
ADAPMIXED_HD double vsqrt(double a) { return std::sqrt(a); }
ADAPMIXED_HD double vround(double a) { return std::nearbyint(a); }
ADAPMIXED_HD double vselect(bool m, double a, double b) { return m ? a : b; }
ADAPMIXED_HD double vldexp(double a, double n) { return std::ldexp(a, static_cast<int>(n)); }
// 2^n for |n| <= 1000.
ADAPMIXED_HD double power_of_two(double n) {
  n += 6755399441055744.0;  // 1.5 * 2^52: the integer is in the low bits
  return bit_cast<double>((bit_cast<std::uint64_t>(n) + 1023) << 52);
}
// a = 2^e m with m in [sqrt(1/2), sqrt(2)), for a normal, positive and finite a.
ADAPMIXED_HD void vsplit(double a, double& e, double& m) {
  const auto bits = bit_cast<std::int64_t>(a);
  // Subtracting the bits of sqrt(1/2) makes the exponent field round to the nearer power.
  const std::int64_t offset = 0x3fe6a09e667f3bcd;
  const std::int64_t k = (bits - offset) >> 52;
  e = static_cast<double>(k);
  m = bit_cast<double>(bits - k * (std::int64_t{1} << 52));
}

constexpr double kLog2e = 1.4426950408889634074;
// ln 2 in two parts. The high part has 21 trailing zero bits, so n * kLn2Hi is exact for
// |n| < 2^20.
constexpr double kLn2Hi = 6.93147180369123816490e-01;
constexpr double kLn2Lo = 1.90821492927058770002e-10;

// e^u = scale * (1 + f + tail) with u = n ln 2 + f. tail = e^f - 1 - f >= 0 has relative accuracy.
template <class T>
struct ExpParts {
  T n, f, tail;
};

template <class T>
ADAPMIXED_HD ExpParts<T> exp_parts(T u) {
  // Beyond these limits the result is exactly inf or 0. The clamp keeps n finite for infinite u.
  u = vmax(vmin(u, T(1e4)), T(-1e4));
  const T n = vround(u * T(kLog2e));
  T f = vfma(n, T(-kLn2Hi), u);
  f = vfma(n, T(-kLn2Lo), f);
  // (e^f - 1 - f) / f^2 on |f| <= ln(2)/2; the first term left out is f^14/14! < 5e-18 relative.
  T p = T(1.0 / 6227020800.0);
  p = vfma(p, f, T(1.0 / 479001600.0));
  p = vfma(p, f, T(1.0 / 39916800.0));
  p = vfma(p, f, T(1.0 / 3628800.0));
  p = vfma(p, f, T(1.0 / 362880.0));
  p = vfma(p, f, T(1.0 / 40320.0));
  p = vfma(p, f, T(1.0 / 5040.0));
  p = vfma(p, f, T(1.0 / 720.0));
  p = vfma(p, f, T(1.0 / 120.0));
  p = vfma(p, f, T(1.0 / 24.0));
  p = vfma(p, f, T(1.0 / 6.0));
  p = vfma(p, f, T(0.5));
  return {n, f, p * f * f};
}

template <class T>
ADAPMIXED_HD T exp_(T u) {
  const ExpParts<T> e = exp_parts(u);
  return vldexp(T(1.0) + (e.f + e.tail), e.n);
}

// e^u - 1 from `value` = e^u. For large n the two are equal, and the sum of parts could be
// inf - inf.
template <class T>
ADAPMIXED_HD T minus_one(const ExpParts<T>& e, T value) {
  const T scale = vldexp(T(1.0), e.n);
  return vselect(e.n > T(60.0), value, vfma(scale, e.f + e.tail, scale - T(1.0)));
}

// r = e^t and d = r - 1, each with relative accuracy; t = -inf gives (0, -1).
template <class T>
struct Ratio {
  T r, d;
};

template <class T>
ADAPMIXED_HD Ratio<T> ratio(T t) {
  const ExpParts<T> e = exp_parts(t);
  const T r = vldexp(T(1.0) + (e.f + e.tail), e.n);
  return {r, minus_one(e, r)};
}

// The relative error of r = p/q in double: for log-sum-exps near 0, and for any log-sum-exps.
constexpr double kDoubleRatioError = 1e-12;
ADAPMIXED_HD double double_ratio_error(double private_lse, double public_lse) {
  return kDoubleRatioError + 4.5e-16 * (std::fabs(private_lse) + std::fabs(public_lse));
}

// log X and, for X near 1, log1p(x) - x with relative accuracy. x = X - 1 is a separate argument
// because computing it from X would lose its small digits. X = 0 and denormal X give -inf. That is
// the safe side: a small X stands for a mixture that has almost lost a token.
template <class T>
struct LogParts {
  T log, excess;
};

template <class T>
ADAPMIXED_HD LogParts<T> log_parts(T x, T X) {
  T e, m;
  vsplit(X, e, m);  // X = 2^e m, m in [sqrt(1/2), sqrt(2))
  const T w = vselect(e == T(0.0), x, m - T(1.0));
  const T s = w / (T(2.0) + w);
  const T z = s * s;
  // 2 atanh(s) = 2 s + s z P(z); |s| <= 0.172, the first term left out is 2 z^11/23 < 2e-18.
  T p = T(2.0 / 21.0);
  p = vfma(p, z, T(2.0 / 19.0));
  p = vfma(p, z, T(2.0 / 17.0));
  p = vfma(p, z, T(2.0 / 15.0));
  p = vfma(p, z, T(2.0 / 13.0));
  p = vfma(p, z, T(2.0 / 11.0));
  p = vfma(p, z, T(2.0 / 9.0));
  p = vfma(p, z, T(2.0 / 7.0));
  p = vfma(p, z, T(2.0 / 5.0));
  p = vfma(p, z, T(2.0 / 3.0));
  const T zp = z * p;
  // 2 s - w = -s w exactly: this is the cancellation that the excess must not suffer.
  const T excess = s * (zp - w);
  const T log = vfma(e, T(kLn2Hi), vfma(s, zp, s + s) + e * T(kLn2Lo));
  return {vselect(X >= T(std::numeric_limits<double>::min()), log, T(-HUGE_VAL)), excess};
}

// (1 + x)^s - 1 - s x and (1 + x)^s from the logarithm of 1 + x, for any real s. The excess is >= 0
// for s >= 1 and s <= 0, and keeps its relative accuracy as x -> 0.
template <class T>
struct Power {
  T excess, value;
};

template <class T>
ADAPMIXED_HD Power<T> power(T x, const LogParts<T>& l, T s) {
  const T u = s * l.log;
  const ExpParts<T> e = exp_parts(u);
  const T value = vldexp(T(1.0) + (e.f + e.tail), e.n);
  const T direct = minus_one(e, value) - s * x;
  // The excess as (e^u - 1 - u) + (u - s x): both parts are small and accurate if u and x are
  // small.
  const T small = vfma(s, l.excess, e.tail);
  const auto near = (vabs(x) < T(0.25)) & (e.n == T(0.0));
  return {vselect(near, small, direct), value};
}

// The same for integer powers k >= 1, by multiplication: c = (1+x)^k - 1 - k x and e = (1+x)^k - 1
// satisfy
//   c_{2k} = 2 c_k + e_k^2,  c_{k+1} = c_k + e_k x,  e_k = c_k + k x.
// Every c is >= 0, and no step cancels.
template <class T>
struct Chain {
  T c, e;
};

template <class T>
ADAPMIXED_HD Chain<T> chain(T x, int k) {
  T c = T(0.0), e = x;
  int done = 1, bit = 1;
  while (bit <= k / 2) bit *= 2;  // the highest power of two in k
  for (bit /= 2; bit > 0; bit /= 2) {
    c = vfma(e, e, c + c);
    done *= 2;
    e = vfma(T(static_cast<double>(done)), x, c);
    if (k & bit) {
      c = vfma(e, x, c);
      ++done;
      e = vfma(T(static_cast<double>(done)), x, c);
    }
  }
  return {c, e};
}

// The order as an integer if chain() can compute its powers, else 0.
ADAPMIXED_HD int integer_order(double order) {
  return order == std::floor(order) && order <= 1024.0 ? static_cast<int>(order) : 0;
}

// log(e^a + e^b) for a, b in [-inf, inf); NaN if either is.
ADAPMIXED_HD double log_add(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  const double high = std::fmax(a, b);
  return high == -HUGE_VAL ? high : high + std::log1p(std::exp(std::fmin(a, b) - high));
}

ADAPMIXED_CORE_END
