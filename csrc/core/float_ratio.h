// r - 1 = p/q - 1 in single precision from the logits themselves, with a known error. Templates
// over F: float, or a SIMD vector of floats (cpu/simd_float.h).
//
// log2 r = (z - z0) log2(e) - c with c = (lse - lse_0) log2(e); r - 1 = 2^n (2^f - 1) + (2^n - 1).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/config.h"

ADAPMIXED_CORE_BEGIN

constexpr double kFloatUnit = 0x1p-24;        // half a unit in the last place of 1
constexpr float kFloatShifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float kFloatLog2e = 1.44269504f;    // rounded
// What was lost by that.
constexpr double kFloatLog2eError = static_cast<double>(kFloatLog2e) - 1.4426950408889634074;

ADAPMIXED_HD float vfma(float a, float b, float c) { return std::fma(a, b, c); }
ADAPMIXED_HD float vfms(float a, float b, float c) { return std::fma(a, b, -c); }
ADAPMIXED_HD float vmin(float a, float b) { return a < b ? a : b; }
ADAPMIXED_HD float vmax(float a, float b) { return a > b ? a : b; }
// 2^n, n an integer >= -126 and shifted = n + kFloatShifter; at least 2^127 for n >= 127.
ADAPMIXED_HD float exp2_integer(float, float shifted) {
  shifted = vmin(kFloatShifter + 127.0f, shifted);
  std::uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000u;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// 2^f - 1 for |f| <= 0.51, relative error below 2.2 units (kFloatUnit) before its own roundings.
template <class F>
ADAPMIXED_HD_INLINE F exp2_minus_one(F f) {
  F p = F(0.000154035126f);
  p = vfma(p, f, F(0.00133907355f));
  p = vfma(p, f, F(0.00961823749f));
  p = vfma(p, f, F(0.0555035743f));
  p = vfma(p, f, F(0.240226498f));
  p = vfma(p, f, F(0.693147188f));
  return p * f;
}

// What one row subtracts from its log-ratios, and what it multiplies the result with.
struct FloatShift {
  float c;          // rounded
  float lowest;     // z - z0 below which r < e^-79: read as this
  double residual;  // 2^-(what the rounding of c and of log2(e) left of it) - 1
};

ADAPMIXED_HD FloatShift make_shift(double lse_difference) {
  const double c = lse_difference * 1.4426950408889634074;
  const auto rounded = static_cast<float>(c);
  // z - z0 = log r + lse_difference is multiplied with the rounded log2(e); what that does to
  // log r itself is an error of 0.22 units of it.
  const double rest = rounded - c - lse_difference * kFloatLog2eError;
  return {rounded, static_cast<float>(lse_difference - 80.0),
          std::expm1(rest * 0.69314718055994530942)};
}

// Errors in units (kFloatUnit): kRatioUnits of |r - 1| and, of r, kLogUnits of |log r| and one of
// the |lse_difference|, which is lost when z - z0 is rounded.
constexpr double kRatioUnits = 4.0;
constexpr double kLogUnits = 2.3;

// r' - 1 with r = r' (1 + residual), from z - z0. NaN stays NaN, and so becomes +inf.
template <class F>
ADAPMIXED_HD_INLINE F ratio_excess(F difference, const FloatShift& shift) {
  // The second operand of vmax passes when it is NaN.
  const F t = vfms(vmax(F(shift.lowest), difference), F(kFloatLog2e), F(shift.c));
  const F shifted = t + F(kFloatShifter);
  const F n = shifted - F(kFloatShifter);
  const F scale = exp2_integer(n, shifted);
  return vfma(scale, exp2_minus_one(t - n), scale - F(1.0f));
}

ADAPMIXED_CORE_END
