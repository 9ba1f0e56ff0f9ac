// A vector of doubles in the registers of the instruction set that this file is compiled for, with
// the operations that common/elementary.h needs. Internal to the builds per instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/config.h"
#include "common/elementary.h"
#include "common/view.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

ADAPMIXED_CORE_BEGIN

#if defined(__AVX512F__) || defined(__AVX2__)

// Most operations differ in the beginnings of their names alone. Casts between vectors of one size
// keep all bits.
#if defined(__AVX512F__)
#define ADAPMIXED_ALL(operation) _mm512_##operation
#define ADAPMIXED_HALF(operation) _mm256_##operation
using Doubles = __m512d;
using Floats = __m512;
using Integers = __m512i;
using HalfFloats = __m256;
using HalfIntegers = __m256i;
using MaskBits = __mmask8;
#define ADAPMIXED_COMPARE(a, b, how) _mm512_cmp_pd_mask(a, b, how)
#define ADAPMIXED_ROUND _mm512_roundscale_pd
#else
#define ADAPMIXED_ALL(operation) _mm256_##operation
#define ADAPMIXED_HALF(operation) _mm_##operation
using Doubles = __m256d;
using Floats = __m256;
using Integers = __m256i;
using HalfFloats = __m128;
using HalfIntegers = __m128i;
using MaskBits = __m256i;
#define ADAPMIXED_COMPARE(a, b, how) (MaskBits) _mm256_cmp_pd(a, b, how)
#define ADAPMIXED_ROUND _mm256_round_pd
#endif

struct Mask {
  MaskBits m;
  Mask operator&(Mask o) const { return {static_cast<MaskBits>(m & o.m)}; }
  Mask operator|(Mask o) const { return {static_cast<MaskBits>(m | o.m)}; }
  Mask operator^(Mask o) const { return {static_cast<MaskBits>(m ^ o.m)}; }
  bool any() const { return bits() != 0; }
#if defined(__AVX512F__)
  unsigned bits() const { return m; }
#else
  unsigned bits() const { return static_cast<unsigned>(_mm256_movemask_pd((Doubles)m)); }
#endif
};

struct Vec {
  using Scalar = double;
  static constexpr int kLanes = sizeof(Doubles) / sizeof(double);
  Doubles v;
  Vec() = default;
  Vec(Doubles x) : v(x) {}
  explicit Vec(double x) : v(ADAPMIXED_ALL(set1_pd)(x)) {}
  static Vec load(const double* p) { return ADAPMIXED_ALL(loadu_pd)(p); }
  void store(double* p) const { ADAPMIXED_ALL(storeu_pd)(p, v); }
  Vec operator+(Vec o) const { return ADAPMIXED_ALL(add_pd)(v, o.v); }
  Vec operator-(Vec o) const { return ADAPMIXED_ALL(sub_pd)(v, o.v); }
  Vec operator*(Vec o) const { return ADAPMIXED_ALL(mul_pd)(v, o.v); }
  Vec operator/(Vec o) const { return ADAPMIXED_ALL(div_pd)(v, o.v); }
  Mask operator<(Vec o) const { return {ADAPMIXED_COMPARE(v, o.v, _CMP_LT_OQ)}; }
  Mask operator>(Vec o) const { return {ADAPMIXED_COMPARE(v, o.v, _CMP_GT_OQ)}; }
  Mask operator>=(Vec o) const { return {ADAPMIXED_COMPARE(v, o.v, _CMP_GE_OQ)}; }
  Mask operator==(Vec o) const { return {ADAPMIXED_COMPARE(v, o.v, _CMP_EQ_OQ)}; }
  Mask is_nan() const { return {ADAPMIXED_COMPARE(v, v, _CMP_UNORD_Q)}; }
};

inline Vec vfma(Vec a, Vec b, Vec c) { return ADAPMIXED_ALL(fmadd_pd)(a.v, b.v, c.v); }
inline Vec vmin(Vec a, Vec b) { return ADAPMIXED_ALL(min_pd)(a.v, b.v); }
inline Vec vmax(Vec a, Vec b) { return ADAPMIXED_ALL(max_pd)(a.v, b.v); }
inline Vec vabs(Vec a) { return ADAPMIXED_ALL(andnot_pd)(Vec(-0.0).v, a.v); }
inline Vec vsqrt(Vec a) { return ADAPMIXED_ALL(sqrt_pd)(a.v); }
// Rounds towards zero, for |a| < 2^63.
inline Vec vtrunc(Vec a) { return ADAPMIXED_ROUND(a.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
inline Vec vround(Vec a) {
  return ADAPMIXED_ROUND(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#undef ADAPMIXED_COMPARE
#undef ADAPMIXED_ROUND
// Adds the bit patterns as integers.
inline Vec add_bits(Vec a, Vec b) {
  return (Doubles)ADAPMIXED_ALL(add_epi64)((Integers)a.v, (Integers)b.v);
}
inline Vec load_f32(const float* p) { return ADAPMIXED_ALL(cvtps_pd)(ADAPMIXED_HALF(loadu_ps)(p)); }
inline __m128i load_u16(const std::uint16_t* p) {
  __m128i x{};
  std::memcpy(&x, p, Vec::kLanes * sizeof *p);
  return x;
}
inline Vec load_bf16(const std::uint16_t* p) {
  const HalfIntegers wide = ADAPMIXED_HALF(cvtepu16_epi32)(load_u16(p));
  return ADAPMIXED_ALL(cvtps_pd)((HalfFloats)ADAPMIXED_HALF(slli_epi32)(wide, 16));
}
inline Vec load_f16(const std::uint16_t* p) {
  return ADAPMIXED_ALL(cvtps_pd)(ADAPMIXED_HALF(cvtph_ps)(load_u16(p)));
}

#if defined(__AVX512F__)
inline Vec vselect(Mask m, Vec a, Vec b) { return _mm512_mask_blend_pd(m.m, b.v, a.v); }
inline Vec vldexp(Vec a, Vec n) { return _mm512_scalef_pd(a.v, n.v); }
inline Vec power_of_two(Vec n) { return _mm512_scalef_pd(_mm512_set1_pd(1.0), n.v); }
inline void vsplit(Vec a, Vec& e, Vec& m) {
  const __m512i bits = _mm512_castpd_si512(a.v);
  const __m512i k =
      _mm512_srai_epi64(_mm512_sub_epi64(bits, _mm512_set1_epi64(0x3fe6a09e667f3bcd)), 52);
  e = _mm512_cvtepi64_pd(k);
  m = _mm512_castsi512_pd(_mm512_sub_epi64(bits, _mm512_slli_epi64(k, 52)));
}
inline Vec load_u32(const std::uint32_t* p) {
  return _mm512_cvtepu32_pd(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#else
inline Vec vselect(Mask m, Vec a, Vec b) { return _mm256_blendv_pd(b.v, a.v, (Doubles)m.m); }
inline Vec power_of_two(Vec n) {
  // 1.5 * 2^52 puts the integer n into the low mantissa bits.
  const __m256i k = _mm256_castpd_si256(_mm256_add_pd(n.v, _mm256_set1_pd(6755399441055744.0)));
  return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_add_epi64(k, _mm256_set1_epi64x(1023)), 52));
}
// a 2^n for a normal a and a normal result; shifted = n + 1.5 * 2^52.
inline Vec add_exponent(Vec a, Vec shifted) {
  const __m256i n = _mm256_slli_epi64(_mm256_castpd_si256(shifted.v), 52);
  return _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(a.v), n));
}
inline Vec vldexp(Vec a, Vec n) {
  // Three factors reach every result from denormal to overflow. Beyond the clamp the result is 0 or
  // inf.
  n = vmax(vmin(n, Vec(2100.0)), Vec(-2200.0));
  const Vec third = vround(n * Vec(1.0 / 3.0));
  const Vec s = power_of_two(third);
  return ((a * s) * s) * power_of_two(n - third - third);
}
inline void vsplit(Vec a, Vec& e, Vec& m) {
  const __m256i bits = _mm256_castpd_si256(a.v);
  // The bias keeps the shifted value positive: AVX2 has no arithmetic 64-bit shift.
  const __m256i biased =
      _mm256_add_epi64(_mm256_sub_epi64(bits, _mm256_set1_epi64x(0x3fe6a09e667f3bcd)),
                       _mm256_set1_epi64x(0x4000000000000000));
  const __m256i k = _mm256_srli_epi64(biased, 52);  // exponent + 1024
  const __m256i magic = _mm256_set1_epi64x(0x4330000000000000);
  e = _mm256_sub_pd(_mm256_castsi256_pd(_mm256_or_si256(k, magic)),
                    _mm256_set1_pd(4503599627370496.0 + 1024.0));
  const __m256i exponent = _mm256_sub_epi64(k, _mm256_set1_epi64x(1024));
  m = _mm256_castsi256_pd(_mm256_sub_epi64(bits, _mm256_slli_epi64(exponent, 52)));
}
inline Vec load_u32(const std::uint32_t* p) {
  // AVX2 converts signed integers only. Shifting by 2^31 before and after is exact.
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256d shifted = _mm256_cvtepi32_pd(_mm_xor_si128(x, _mm_set1_epi32(INT32_MIN)));
  return _mm256_add_pd(shifted, _mm256_set1_pd(2147483648.0));
}
#endif

#else

struct Mask {
  bool m;
  Mask operator&(Mask o) const { return {m && o.m}; }
  Mask operator|(Mask o) const { return {m || o.m}; }
  Mask operator^(Mask o) const { return {m != o.m}; }
  bool any() const { return m; }
  unsigned bits() const { return m ? 1u : 0u; }
};

struct Vec {
  using Scalar = double;
  static constexpr int kLanes = 1;
  double v;
  Vec() = default;
  explicit Vec(double x) : v(x) {}
  static Vec load(const double* p) { return Vec(*p); }
  void store(double* p) const { *p = v; }
  Vec operator+(Vec o) const { return Vec(v + o.v); }
  Vec operator-(Vec o) const { return Vec(v - o.v); }
  Vec operator*(Vec o) const { return Vec(v * o.v); }
  Vec operator/(Vec o) const { return Vec(v / o.v); }
  Mask operator<(Vec o) const { return {v < o.v}; }
  Mask operator>(Vec o) const { return {v > o.v}; }
  Mask operator>=(Vec o) const { return {v >= o.v}; }
  Mask operator==(Vec o) const { return {v == o.v}; }
  Mask is_nan() const { return {v != v}; }
};

inline Vec vfma(Vec a, Vec b, Vec c) { return Vec(vfma(a.v, b.v, c.v)); }
inline Vec vmin(Vec a, Vec b) { return Vec(vmin(a.v, b.v)); }
inline Vec vmax(Vec a, Vec b) { return Vec(vmax(a.v, b.v)); }
inline Vec vabs(Vec a) { return Vec(vabs(a.v)); }
inline Vec vsqrt(Vec a) { return Vec(vsqrt(a.v)); }
inline Vec vtrunc(Vec a) { return Vec(static_cast<double>(static_cast<std::int64_t>(a.v))); }
inline Vec vround(Vec a) { return Vec(vround(a.v)); }
inline Vec vselect(Mask m, Vec a, Vec b) { return m.m ? a : b; }
inline Vec vldexp(Vec a, Vec n) { return Vec(vldexp(a.v, n.v)); }
inline Vec power_of_two(Vec n) { return Vec(power_of_two(n.v)); }
inline Vec add_exponent(Vec a, Vec shifted) {
  const auto n = bit_cast<std::uint64_t>(shifted.v) << 52;
  return Vec(bit_cast<double>(bit_cast<std::uint64_t>(a.v) + n));
}
inline Vec add_bits(Vec a, Vec b) {
  return Vec(bit_cast<double>(bit_cast<std::uint64_t>(a.v) + bit_cast<std::uint64_t>(b.v)));
}
inline void vsplit(Vec a, Vec& e, Vec& m) { vsplit(a.v, e.v, m.v); }
inline Vec load_u32(const std::uint32_t* p) { return Vec(static_cast<double>(*p)); }
inline Vec load_f32(const float* p) { return Vec(*p); }
inline Vec load_bf16(const std::uint16_t* p) { return Vec(bf16_to_double(*p)); }
inline Vec load_f16(const std::uint16_t* p) { return Vec(f16_to_double(*p)); }

#endif

// Adds the lanes in index order, so that the result depends on the inputs alone.
inline double sum(Vec a) {
  double x[Vec::kLanes];
  a.store(x);
  double s = x[0];
  for (int i = 1; i < Vec::kLanes; ++i) s += x[i];
  return s;
}
inline double maximum(Vec a) {
  double x[Vec::kLanes];
  a.store(x);
  double s = x[0];
  for (int i = 1; i < Vec::kLanes; ++i) s = vmax(s, x[i]);
  return s;
}

ADAPMIXED_CORE_END
