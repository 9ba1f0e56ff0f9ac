// A vector of floats, with twice as many lanes as Vec (common/simd.h). Internal to the builds per
// instruction set. The float kernels use it for the common cases and Vec for rare or delicate ones.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/several.h"
#include "common/simd.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

ADAPMIXED_CORE_BEGIN

#if defined(__AVX512F__) || defined(__AVX2__)

#if defined(__AVX512F__)
using FltMaskBits = __mmask16;
#else
using FltMaskBits = __m256i;
#endif

struct FltMask {
  FltMaskBits m;
  FltMask operator|(FltMask o) const { return {static_cast<FltMaskBits>(m | o.m)}; }
#if defined(__AVX512F__)
  unsigned bits() const { return m; }
#else
  unsigned bits() const { return static_cast<unsigned>(_mm256_movemask_ps((Floats)m)); }
#endif
};

struct Flt {
  using Scalar = float;
  static constexpr int kLanes = 2 * Vec::kLanes;
  Floats v;
  Flt() = default;
  Flt(Floats x) : v(x) {}
  explicit Flt(float x) : v(ADAPMIXED_ALL(set1_ps)(x)) {}
  static Flt load(const float* p) { return ADAPMIXED_ALL(loadu_ps)(p); }
  void store(float* p) const { ADAPMIXED_ALL(storeu_ps)(p, v); }
  Flt operator+(Flt o) const { return ADAPMIXED_ALL(add_ps)(v, o.v); }
  Flt operator-(Flt o) const { return ADAPMIXED_ALL(sub_ps)(v, o.v); }
  Flt operator*(Flt o) const { return ADAPMIXED_ALL(mul_ps)(v, o.v); }
  Flt operator/(Flt o) const { return ADAPMIXED_ALL(div_ps)(v, o.v); }
#if defined(__AVX512F__)
  FltMask operator>(Flt o) const { return {_mm512_cmp_ps_mask(v, o.v, _CMP_GT_OQ)}; }
#else
  FltMask operator>(Flt o) const { return {(FltMaskBits)_mm256_cmp_ps(v, o.v, _CMP_GT_OQ)}; }
#endif
};

inline Flt vfma(Flt a, Flt b, Flt c) { return ADAPMIXED_ALL(fmadd_ps)(a.v, b.v, c.v); }
inline Flt vfms(Flt a, Flt b, Flt c) { return ADAPMIXED_ALL(fmsub_ps)(a.v, b.v, c.v); }
inline Flt vmin(Flt a, Flt b) { return ADAPMIXED_ALL(min_ps)(a.v, b.v); }
inline Flt vmax(Flt a, Flt b) { return ADAPMIXED_ALL(max_ps)(a.v, b.v); }
inline Flt vabs(Flt a) { return ADAPMIXED_ALL(andnot_ps)(Flt(-0.0f).v, a.v); }
// See common/float_ratio.h. It uses integer operations because vscalefps occupies the adders for
// several cycles.
inline Flt exp2_integer(Flt shifted) {
  const Integers n = ADAPMIXED_ALL(slli_epi32)((Integers)vmin(Flt(kMostOctaves), shifted).v, 23);
  return (Floats)ADAPMIXED_ALL(add_epi32)(n, ADAPMIXED_ALL(set1_epi32)(0x3f800000));
}
// a = 2^e m with m in [sqrt(1/2), sqrt(2)); a is normal.
inline void vsplit(Flt a, Flt& e, Flt& m) {
  const Integers bits = (Integers)a.v, least = ADAPMIXED_ALL(set1_epi32)(0x3f3504f3);
  const Integers k = ADAPMIXED_ALL(srai_epi32)(ADAPMIXED_ALL(sub_epi32)(bits, least), 23);
  e = ADAPMIXED_ALL(cvtepi32_ps)(k);
  m = (Floats)ADAPMIXED_ALL(sub_epi32)(bits, ADAPMIXED_ALL(slli_epi32)(k, 23));
}
#if defined(__AVX512F__)
inline Flt vselect(FltMask m, Flt a, Flt b) { return _mm512_mask_blend_ps(m.m, b.v, a.v); }
// The lanes of a that m has, side by side; 0 in the others.
inline Flt compress(FltMask m, Flt a) { return _mm512_maskz_compress_ps(m.m, a.v); }
// 1 / a within 2 units; a is normal.
inline Flt reciprocal(Flt a) {
  const __m512 r = _mm512_rcp14_ps(a.v);
  return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a.v, r, _mm512_set1_ps(1.0f)), r);
}
// The two halves, as doubles.
inline Vec low_half(Flt a) { return _mm512_cvtps_pd(_mm512_castps512_ps256(a.v)); }
inline Vec high_half(Flt a) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.v, 1)); }
inline Flt narrow(Vec low, Vec high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low.v)), _mm512_cvtpd_ps(high.v),
                            1);
}
#else
inline Flt vselect(FltMask m, Flt a, Flt b) { return _mm256_blendv_ps(b.v, a.v, (Floats)m.m); }
inline Flt reciprocal(Flt a) { return Flt(1.0f) / a; }
inline Vec low_half(Flt a) { return _mm256_cvtps_pd(_mm256_castps256_ps128(a.v)); }
inline Vec high_half(Flt a) { return _mm256_cvtps_pd(_mm256_extractf128_ps(a.v, 1)); }
inline Flt narrow(Vec low, Vec high) {
  return _mm256_set_m128(_mm256_cvtpd_ps(high.v), _mm256_cvtpd_ps(low.v));
}
#endif
inline Flt load_float_f32(const float* p) { return Flt::load(p); }
inline HalfIntegers load_half(const std::uint16_t* p) {
  HalfIntegers x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline Flt load_float_bf16(const std::uint16_t* p) {
  return (Floats)ADAPMIXED_ALL(slli_epi32)(ADAPMIXED_ALL(cvtepu16_epi32)(load_half(p)), 16);
}
inline Flt load_float_f16(const std::uint16_t* p) { return ADAPMIXED_ALL(cvtph_ps)(load_half(p)); }

#else

struct FltMask {
  unsigned m;
  unsigned bits() const { return m; }
  FltMask operator|(FltMask o) const { return {m | o.m}; }
};

// Two lanes, so that each half is one Vec, as on the other instruction sets.
struct Flt {
  using Scalar = float;
  static constexpr int kLanes = 2;
  float a, b;
  Flt() = default;
  Flt(float x, float y) : a(x), b(y) {}
  explicit Flt(float x) : a(x), b(x) {}
  static Flt load(const float* p) { return {p[0], p[1]}; }
  void store(float* p) const { p[0] = a, p[1] = b; }
  Flt operator+(Flt o) const { return {a + o.a, b + o.b}; }
  Flt operator-(Flt o) const { return {a - o.a, b - o.b}; }
  Flt operator*(Flt o) const { return {a * o.a, b * o.b}; }
  Flt operator/(Flt o) const { return {a / o.a, b / o.b}; }
  FltMask operator>(Flt o) const { return {(a > o.a ? 1u : 0u) | (b > o.b ? 2u : 0u)}; }
};

inline Flt vfma(Flt a, Flt b, Flt c) { return {std::fma(a.a, b.a, c.a), std::fma(a.b, b.b, c.b)}; }
inline Flt vfms(Flt a, Flt b, Flt c) {
  return {std::fma(a.a, b.a, -c.a), std::fma(a.b, b.b, -c.b)};
}
inline Flt vmin(Flt a, Flt b) { return {a.a < b.a ? a.a : b.a, a.b < b.b ? a.b : b.b}; }
inline Flt vmax(Flt a, Flt b) { return {a.a > b.a ? a.a : b.a, a.b > b.b ? a.b : b.b}; }
inline Flt vabs(Flt a) { return {std::fabs(a.a), std::fabs(a.b)}; }
inline Flt vselect(FltMask m, Flt a, Flt b) { return {m.m & 1u ? a.a : b.a, m.m & 2u ? a.b : b.b}; }
inline Flt exp2_integer(Flt shifted) { return {exp2_integer(shifted.a), exp2_integer(shifted.b)}; }
inline void vsplit(Flt a, Flt& e, Flt& m) { vsplit(a.a, e.a, m.a), vsplit(a.b, e.b, m.b); }
inline Flt reciprocal(Flt a) { return {1.0f / a.a, 1.0f / a.b}; }
inline Vec low_half(Flt a) { return Vec(static_cast<double>(a.a)); }
inline Vec high_half(Flt a) { return Vec(static_cast<double>(a.b)); }
inline Flt narrow(Vec low, Vec high) {
  return {static_cast<float>(low.v), static_cast<float>(high.v)};
}
inline Flt load_float_f32(const float* p) { return Flt::load(p); }
inline Flt load_float_bf16(const std::uint16_t* p) {
  return {static_cast<float>(bf16_to_double(p[0])), static_cast<float>(bf16_to_double(p[1]))};
}
inline Flt load_float_f16(const std::uint16_t* p) {
  return {static_cast<float>(f16_to_double(p[0])), static_cast<float>(f16_to_double(p[1]))};
}

#endif

#if !defined(__AVX512F__)
// The lanes of a that m has, side by side; 0 in the others.
inline Flt compress(FltMask m, Flt a) {
  float from[Flt::kLanes], to[Flt::kLanes] = {};
  a.store(from);
  int count = 0;
  for (unsigned bits = m.bits(); bits != 0; bits &= bits - 1) {
    to[count++] = from[__builtin_ctz(bits)];
  }
  return Flt::load(to);
}
#endif

using Quad = Several<Flt, 4>;

inline bool any(FltMask m) { return m.bits() != 0; }
inline bool any(Mask m) { return m.any(); }

// While an object lives, results below the normal range are 0 on this thread. For sums in which
// they cannot matter: arithmetic with denormals is many times slower.
class FlushDenormals {
 public:
#if defined(__SSE2__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

// Adds the lanes in double.
inline Vec widened(Flt a) { return low_half(a) + high_half(a); }
// The same of a 2^n.
inline Vec widened(Flt a, Flt n) {
  return vldexp(low_half(a), low_half(n)) + vldexp(high_half(a), high_half(n));
}
inline double sum(Flt a) { return sum(widened(a)); }
// The sums over the lanes of four vectors, in floats.
inline void sum_four(const Flt (&a)[4], float (&sums)[4]) {
#if defined(__AVX2__)
  __m256 part[4];
  ADAPMIXED_UNROLL
  for (int k = 0; k < 4; ++k) {
#if defined(__AVX512F__)
    part[k] = _mm256_add_ps(_mm512_castps512_ps256(a[k].v), _mm512_extractf32x8_ps(a[k].v, 1));
#else
    part[k] = a[k].v;
#endif
  }
  const __m256 all =
      _mm256_hadd_ps(_mm256_hadd_ps(part[0], part[1]), _mm256_hadd_ps(part[2], part[3]));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  for (int k = 0; k < 4; ++k) sums[k] = a[k].a + a[k].b;
#endif
}
inline float maximum(Flt a) {
  float x[Flt::kLanes];
  a.store(x);
  float s = x[0];
  for (int i = 1; i < Flt::kLanes; ++i) s = x[i] > s ? x[i] : s;
  return s;
}

ADAPMIXED_CORE_END
