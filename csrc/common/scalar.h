// The operations that the mathematics needs of its element type, for plain double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/config.h"

ADAPMIXED_CORE_BEGIN

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
  std::uint64_t bits;
  std::memcpy(&bits, &n, sizeof bits);
  bits = (bits + 1023) << 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// a = 2^e m with m in [sqrt(1/2), sqrt(2)), for a normal, positive and finite a.
ADAPMIXED_HD void vsplit(double a, double& e, double& m) {
  std::int64_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  // Subtracting the bits of sqrt(1/2) makes the exponent field round to the nearer power.
  const std::int64_t offset = 0x3fe6a09e667f3bcd;
  const std::int64_t k = (bits - offset) >> 52;
  e = static_cast<double>(k);
  const std::int64_t mantissa = bits - k * (std::int64_t{1} << 52);
  std::memcpy(&m, &mantissa, sizeof m);
}

ADAPMIXED_CORE_END
