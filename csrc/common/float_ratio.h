// r - 1 = p/q - 1 in single precision, from the logits themselves. The error is proportional to
// r - 1, however far r is from 1 and however far apart the two log-sum-exps are. Templates over F:
// float, or a SIMD vector of floats (common/simd_float.h).
//
// Logarithms are in octaves of 2^{1/m}, m = kOctave. Let L = m log2(e), a = z0 L of the token and
// c = (lse - lse_0) L of the row; then log r = (z L - a - c) / L. a and c are split into a part on
// a grid and a rest. One multiply-add subtracts the grid parts together with the whole octaves n;
// its result is small and rounds once:
//   f = z L - (a_grid + c_grid + n m) - a_rest,   r - 1 = 2^n (2^{f/m} - 1) + (2^n - 1).
// c_rest is the same for a whole row and becomes a factor of r (FloatShift::residual).
#pragma once

#include <cmath>
#include <cstdint>

#include "common/config.h"
#include "common/elementary.h"
#if defined(__CUDACC__) || defined(ADAPMIXED_SIMT)
#include "common/runtime.cuh"
#endif

ADAPMIXED_CORE_BEGIN

constexpr double kFloatUnit = 0x1p-24;        // half a unit in the last place of 1
constexpr float kFloatShifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
// 119/64 times log2(e) lies within 0.003 units (kFloatUnit) of a float; log2(e) itself does not.
constexpr float kOctave = 1.859375f;
constexpr float kOctaveInverse = 0.537815118f;
constexpr float kOctavesPerNat = 2.6825111f;
// a_grid, c_grid and n m are multiples of kGrid. Their sum is exact up to 2^13.
constexpr double kGrid = 0x1p-11;
// That holds up to this |z0|.
constexpr double kFloatLargest = 1300.0;
// A smaller log p is replaced by this value. Floats serve q >= e^-62, so the replaced r is at most
// e^-23. That exceeds kRatioAbsolute only if q < e^-61, and such tokens have no mass to speak of.
constexpr double kFloatLogP = -85.0;

ADAPMIXED_HD float vfma(float a, float b, float c) { return std::fma(a, b, c); }
ADAPMIXED_HD float vfms(float a, float b, float c) { return std::fma(a, b, -c); }
ADAPMIXED_HD float vmin(float a, float b) { return a < b ? a : b; }
ADAPMIXED_HD float vmax(float a, float b) { return a > b ? a : b; }
ADAPMIXED_HD float vabs(float a) { return std::fabs(a); }
ADAPMIXED_HD float vselect(bool m, float a, float b) { return m ? a : b; }
ADAPMIXED_HD bool any(bool m) { return m; }
#if defined(__CUDACC__) || defined(ADAPMIXED_SIMT)
// 1 / x within 1.01 units, for x from 2^-100 to 2^101. A division has three times the instructions,
// and a branch to a slow path.
__device__ inline float reciprocal(float x) {
  const float near = near_reciprocal(x);
  return vfma(vfma(-x, near, 1.0f), near, near);
}
#endif
ADAPMIXED_HD double sum(double a) { return a; }
ADAPMIXED_HD double widened(float a) { return a; }
ADAPMIXED_HD double widened(float a, float n) { return vldexp(a, n); }  // a 2^n
// a = 2^e m with m in [sqrt(1/2), sqrt(2)); a is normal.
ADAPMIXED_HD void vsplit(float a, float& e, float& m) {
  const auto bits = bit_cast<std::int32_t>(a);
  const std::int32_t k = (bits - 0x3f3504f3) >> 23;
  m = bit_cast<float>(bits - static_cast<std::int32_t>(static_cast<std::uint32_t>(k) << 23));
  e = static_cast<float>(k);
}
// 2^n for an integer n >= -126, with shifted = n + kFloatShifter. n >= 128 gives +inf: p/q is at
// most 1/q, so at q >= e^-62 such rows are not those of the log-sum-exps.
constexpr float kMostOctaves = kFloatShifter + 128.0f;
ADAPMIXED_HD float exp2_integer(float shifted) {
#if defined(__CUDA_ARCH__)
  shifted = fminf(kMostOctaves, shifted);  // one instruction; of NaN, any result serves
#else
  shifted = vmin(kMostOctaves, shifted);
#endif
  return bit_cast<float>((bit_cast<std::uint32_t>(shifted) << 23) + 0x3f800000u);
}

// 2^{f/m} - 1 for |f| <= 0.94.
template <class F>
ADAPMIXED_HD_INLINE F octave_minus_one(F f) {
  F p = F(3.7185464e-06f);
  p = vfma(p, f, F(6.019849e-05f));
  p = vfma(p, f, F(0.0008046972f));
  p = vfma(p, f, F(0.008634214f));
  p = vfma(p, f, F(0.06948434f));
  p = vfma(p, f, F(0.37278503f));
  return p * f;
}

// The logits of a row minus this number are small, and exact down to 255 below the log-sum-exp:
// they are then not below 128 if the difference is.
ADAPMIXED_HD double centre_of(double lse) {
  return std::fabs(lse) < 400.0 ? 0.0 : std::floor(lse + 0.5);
}

// A token that is less likely counts as masked.
constexpr double kMaskedLog = -1e4;

// x rounded to the grid; |x| < 2^40.
template <class T>
ADAPMIXED_HD_INLINE T on_grid(T x) {
  const T shifter(6755399441055744.0 * kGrid);  // 1.5 * 2^52
  return (x + shifter) - shifter;
}

// The number that one row subtracts from its log-ratios, and the factor by which it multiplies r.
struct FloatShift {
  float c;          // a multiple of kGrid
  float lowest;     // smaller logits are replaced by this
  double residual;  // r = r' (1 + residual)
};

ADAPMIXED_HD FloatShift make_shift(double private_lse, double public_lse) {
  const double c = (private_lse - public_lse) * static_cast<double>(kOctavesPerNat);
  const double grid = on_grid(c);
  return {static_cast<float>(grid), static_cast<float>(private_lse + kFloatLogP),
          std::expm1((grid - c) / static_cast<double>(kOctavesPerNat))};
}

// The error of r - 1 from ratio_excess and a residual, in units (kFloatUnit): kRatioUnits of
// |r - 1|, plus 5e-11 of r.
//
// Given f, the rest is within 2.96 units of r - 1, found by trying every f at n = 1 (2.26 at
// n = 0). f is rounded twice, each time by a unit of |f| + 2^-12: 2.41 units of r - 1, 2^-12.4 of
// r. L is off by 0.003 units of log r: 0.2 units of r - 1 at |log r| = 62. A residual of 2^-13.4
// carries 5.5 of its own units into r.
constexpr double kRatioUnits = 5.6;
constexpr double kRatioAbsolute = 5e-11;

// The larger of the two; NaN if z is, as vmax passes its second operand then.
template <class F>
ADAPMIXED_HD_INLINE F at_least(float least, F z) {
  return vmax(F(least), z);
}
#if defined(__CUDA_ARCH__)
ADAPMIXED_HD_INLINE float at_least(float least, float z) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(least), "f"(z));
  return larger;
}
#endif

// The same from a with c_grid added to it; log r >= -60. NaN stays NaN.
template <class F>
ADAPMIXED_HD_INLINE F ratio_excess(F z, F a, F a_rest) {
  const F shifted = vfma(vfms(z, F(kOctavesPerNat), a), F(kOctaveInverse), F(kFloatShifter));
  const F n = shifted - F(kFloatShifter);
  const F f = vfms(z, F(kOctavesPerNat), vfma(n, F(kOctave), a)) - a_rest;
  const F scale = exp2_integer(shifted);
  return vfma(scale, octave_minus_one(f), scale - F(1.0f));
}

// The same with smaller logits replaced. NaN stays NaN.
template <class F>
ADAPMIXED_HD_INLINE F ratio_excess(F z, F a_grid, F a_rest, const FloatShift& shift) {
  return ratio_excess(at_least(shift.lowest, z), a_grid + F(shift.c), a_rest);
}

// a of a token in two parts, equal to the parts computed in double for |z0| <= 750: the rest is
// rounded once.
struct FloatToken {
  float grid, rest;
};
ADAPMIXED_HD FloatToken split_token(float z0) {
  constexpr float kShifter = 0x1.8p12f;  // adding it rounds to the grid
  const float grid = vfma(z0, kOctavesPerNat, kShifter) - kShifter;
  return {grid, vfms(z0, kOctavesPerNat, grid)};
}

// q = e^{z0 - lse} of a token, from make_shift(lse, 0) of its row without the residual. The error
// is within 3 units for z0 - lse >= -62: f is rounded once, by half a unit of 1; L is off by
// 0.003 units of log q; the polynomial is off by 2.3 units of |2^{f/m} - 1| <= 0.42; the result is
// rounded once.
template <class F>
ADAPMIXED_HD_INLINE F probability(F z0, const FloatShift& shift) {
  const F per_nat(kOctavesPerNat), c(shift.c);
  const F shifted = vfma(vfms(z0, per_nat, c), F(kOctaveInverse), F(kFloatShifter));
  const F n = shifted - F(kFloatShifter);
  const F f = vfms(z0, per_nat, vfma(n, F(kOctave), c));
  const F scale = exp2_integer(shifted);
  return vfma(scale, octave_minus_one(f), scale);
}

ADAPMIXED_CORE_END
