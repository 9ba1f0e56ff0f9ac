// The AVX-512 intrinsics that csrc uses, emulated with AVX2. Included before everything else
// (g++ -include), it allows the AVX-512 path to be compiled with -mavx2 -mfma -mf16c and run on
// machines without AVX-512.
//
// If AVX2 has the same instruction, it is applied to the two halves, with the same result in every
// bit, also for NaN and flushed denormals. The others are written out lane by lane. Undefined bits
// and approximate results are made as bad as the definition allows.
#pragma once

#include <immintrin.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/config.h"

#if defined(__AVX512F__)
#error "compile with -mavx2 -mfma -mf16c: the instructions that this header stands in for are there"
#endif

ADAPMIXED_CORE_BEGIN
namespace emulated {

struct Floats {
  __m256 half[2];
};
struct Doubles {
  __m256d half[2];
};
struct Integers {
  __m256i half[2];
};
using FloatLanes = std::array<float, 16>;
using DoubleLanes = std::array<double, 8>;
using Int64Lanes = std::array<std::int64_t, 8>;

template <class To, class From>
To as(const From& a) {
  static_assert(sizeof(To) == sizeof(From));
  To b;
  std::memcpy(&b, &a, sizeof b);
  return b;
}

#define ADAPMIXED_UNARY(name, type, half_name) \
  inline type name(type a) { return {{half_name(a.half[0]), half_name(a.half[1])}}; }
#define ADAPMIXED_BINARY(name, type, half_name)                                  \
  inline type name(type a, type b) {                                             \
    return {{half_name(a.half[0], b.half[0]), half_name(a.half[1], b.half[1])}}; \
  }
#define ADAPMIXED_TERNARY(name, type, half_name)                                                   \
  inline type name(type a, type b, type c) {                                                       \
    return {                                                                                       \
        {half_name(a.half[0], b.half[0], c.half[0]), half_name(a.half[1], b.half[1], c.half[1])}}; \
  }
#define ADAPMIXED_SHIFT(name, half_name)                         \
  inline Integers name(Integers a, int n) {                      \
    return {{half_name(a.half[0], n), half_name(a.half[1], n)}}; \
  }

inline Floats set1_ps(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
inline Doubles set1_pd(double x) { return {{_mm256_set1_pd(x), _mm256_set1_pd(x)}}; }
inline Integers set1_epi32(int x) { return {{_mm256_set1_epi32(x), _mm256_set1_epi32(x)}}; }
inline Integers set1_epi64(long long x) { return {{_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)}}; }
inline Floats loadu_ps(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline Doubles loadu_pd(const double* p) { return {{_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)}}; }
inline Integers loadu_si512(const void* p) {
  const auto* half = static_cast<const __m256i*>(p);
  return {{_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)}};
}
inline void storeu_ps(float* p, Floats a) {
  _mm256_storeu_ps(p, a.half[0]), _mm256_storeu_ps(p + 8, a.half[1]);
}
inline void storeu_pd(double* p, Doubles a) {
  _mm256_storeu_pd(p, a.half[0]), _mm256_storeu_pd(p + 4, a.half[1]);
}

ADAPMIXED_BINARY(add_ps, Floats, _mm256_add_ps)
ADAPMIXED_BINARY(add_pd, Doubles, _mm256_add_pd)
ADAPMIXED_BINARY(add_epi32, Integers, _mm256_add_epi32)
ADAPMIXED_BINARY(add_epi64, Integers, _mm256_add_epi64)
ADAPMIXED_BINARY(sub_ps, Floats, _mm256_sub_ps)
ADAPMIXED_BINARY(sub_pd, Doubles, _mm256_sub_pd)
ADAPMIXED_BINARY(sub_epi64, Integers, _mm256_sub_epi64)
ADAPMIXED_BINARY(mul_ps, Floats, _mm256_mul_ps)
ADAPMIXED_BINARY(mul_pd, Doubles, _mm256_mul_pd)
ADAPMIXED_BINARY(div_ps, Floats, _mm256_div_ps)
ADAPMIXED_BINARY(div_pd, Doubles, _mm256_div_pd)
ADAPMIXED_BINARY(min_ps, Floats, _mm256_min_ps)
ADAPMIXED_BINARY(min_pd, Doubles, _mm256_min_pd)
ADAPMIXED_BINARY(max_ps, Floats, _mm256_max_ps)
ADAPMIXED_BINARY(max_pd, Doubles, _mm256_max_pd)
ADAPMIXED_UNARY(sqrt_pd, Doubles, _mm256_sqrt_pd)
ADAPMIXED_TERNARY(fmadd_ps, Floats, _mm256_fmadd_ps)
ADAPMIXED_TERNARY(fmadd_pd, Doubles, _mm256_fmadd_pd)
ADAPMIXED_TERNARY(fmsub_ps, Floats, _mm256_fmsub_ps)
ADAPMIXED_TERNARY(fmsub_pd, Doubles, _mm256_fmsub_pd)
ADAPMIXED_TERNARY(fnmadd_ps, Floats, _mm256_fnmadd_ps)
ADAPMIXED_SHIFT(slli_epi32, _mm256_slli_epi32)
ADAPMIXED_SHIFT(slli_epi64, _mm256_slli_epi64)

#undef ADAPMIXED_UNARY
#undef ADAPMIXED_BINARY
#undef ADAPMIXED_TERNARY
#undef ADAPMIXED_SHIFT

inline Floats abs_ps(Floats a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {{_mm256_andnot_ps(sign, a.half[0]), _mm256_andnot_ps(sign, a.half[1])}};
}
inline Doubles abs_pd(Doubles a) {
  const __m256d sign = _mm256_set1_pd(-0.0);
  return {{_mm256_andnot_pd(sign, a.half[0]), _mm256_andnot_pd(sign, a.half[1])}};
}
inline Integers srai_epi64(Integers a, unsigned n) {
  auto x = as<Int64Lanes>(a);
  for (auto& lane : x) lane >>= n < 63 ? n : 63;
  return as<Integers>(x);
}

template <int kPredicate>
__mmask16 cmp_ps_mask(Floats a, Floats b) {
  const int low = _mm256_movemask_ps(_mm256_cmp_ps(a.half[0], b.half[0], kPredicate));
  const int high = _mm256_movemask_ps(_mm256_cmp_ps(a.half[1], b.half[1], kPredicate));
  return static_cast<__mmask16>(low | high << 8);
}
template <int kPredicate>
__mmask8 cmp_pd_mask(Doubles a, Doubles b) {
  const int low = _mm256_movemask_pd(_mm256_cmp_pd(a.half[0], b.half[0], kPredicate));
  const int high = _mm256_movemask_pd(_mm256_cmp_pd(a.half[1], b.half[1], kPredicate));
  return static_cast<__mmask8>(low | high << 4);
}
// The second operand in lanes where the mask has a one.
inline Floats mask_blend_ps(__mmask16 m, Floats a, Floats b) {
  auto x = as<FloatLanes>(a);
  const auto y = as<FloatLanes>(b);
  for (unsigned i = 0; i < 16; ++i) x[i] = m >> i & 1 ? y[i] : x[i];
  return as<Floats>(x);
}
inline Doubles mask_blend_pd(__mmask8 m, Doubles a, Doubles b) {
  auto x = as<DoubleLanes>(a);
  const auto y = as<DoubleLanes>(b);
  for (unsigned i = 0; i < 8; ++i) x[i] = m >> i & 1 ? y[i] : x[i];
  return as<Doubles>(x);
}
// Uses the low four bits of each index: three name a lane, the fourth chooses the table.
inline Integers permutex2var_epi64(Integers a, Integers index, Integers b) {
  const auto x = as<Int64Lanes>(a), y = as<Int64Lanes>(b);
  auto n = as<Int64Lanes>(index);
  for (auto& lane : n) lane = (lane & 8 ? y : x)[static_cast<std::size_t>(lane & 7)];
  return as<Integers>(n);
}

// An imm8 without a scale: its low four bits have the same meaning as for vroundpd.
template <int kMode>
Doubles roundscale_pd(Doubles a) {
  static_assert(kMode >= 0 && kMode < 16, "a scale is not emulated");
  return {{_mm256_round_pd(a.half[0], kMode), _mm256_round_pd(a.half[1], kMode)}};
}
// a - round(a), and 0 for an infinity.
template <int kMode>
Doubles reduce_pd(Doubles a) {
  const Doubles infinity = set1_pd(std::numeric_limits<double>::infinity());
  const __mmask8 infinite = cmp_pd_mask<_CMP_EQ_OQ>(abs_pd(a), infinity);
  return mask_blend_pd(infinite, sub_pd(a, roundscale_pd<kMode>(a)), set1_pd(0.0));
}
// a 2^floor(b), rounded once.
inline double scalef(double a, double b) {
  if (std::isnan(a)) {
    if (!std::isinf(b)) return a;
    return b > 0.0 ? b : 0.0;
  }
  if (std::isnan(b)) return b;
  if (std::isinf(b) && b > 0.0) return a * b;
  if (std::isinf(b)) return std::isinf(a) ? a * 0.0 : std::copysign(0.0, a);
  return std::ldexp(a, static_cast<int>(std::floor(std::fmin(std::fmax(b, -5000.0), 5000.0))));
}
inline Doubles scalef_pd(Doubles a, Doubles b) {
  auto x = as<DoubleLanes>(a);
  const auto y = as<DoubleLanes>(b);
  for (std::size_t i = 0; i < 8; ++i) x[i] = scalef(x[i], y[i]);
  return as<Doubles>(x);
}
// Powers of two are exact. All others are off by almost the allowed 2^-14, alternately up and down.
inline Floats rcp14_ps(Floats a) {
  constexpr double kError = 0x1p-14 - 0x1p-23;
  auto x = as<FloatLanes>(a);
  for (std::size_t i = 0; i < 16; ++i) {
    const bool exact = (as<std::uint32_t>(x[i]) & 0x7fffff) == 0;
    const double error = exact ? 0.0 : i % 2 ? kError : -kError;
    x[i] = static_cast<float>(1.0 / static_cast<double>(x[i]) * (1.0 + error));
  }
  return as<Floats>(x);
}

inline Integers castps_si512(Floats a) { return as<Integers>(a); }
inline Integers castpd_si512(Doubles a) { return as<Integers>(a); }
inline Floats castsi512_ps(Integers a) { return as<Floats>(a); }
inline Doubles castsi512_pd(Integers a) { return as<Doubles>(a); }
inline __m256 castps512_ps256(Floats a) { return a.half[0]; }
// The upper half is undefined.
inline Floats castps256_ps512(__m256 a) {
  return {{a, _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN())}};
}
template <int kHalf>
__m256 extractf32x8_ps(Floats a) {
  return a.half[kHalf];
}
template <int kHalf>
Floats insertf32x8(Floats a, __m256 b) {
  a.half[kHalf] = b;
  return a;
}

inline Doubles cvtps_pd(__m256 a) {
  return {
      {_mm256_cvtps_pd(_mm256_castps256_ps128(a)), _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))}};
}
inline __m256 cvtpd_ps(Doubles a) {
  return _mm256_set_m128(_mm256_cvtpd_ps(a.half[1]), _mm256_cvtpd_ps(a.half[0]));
}
inline Floats cvtph_ps(__m256i a) {
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
           _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}};
}
inline Integers cvtepu16_epi32(__m256i a) {
  return {{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
           _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))}};
}
inline Doubles cvtepu32_pd(__m256i a) {
  const auto n = as<std::array<std::uint32_t, 8>>(a);
  DoubleLanes x;
  for (std::size_t i = 0; i < 8; ++i) x[i] = n[i];
  return as<Doubles>(x);
}
inline Doubles cvtepi64_pd(Integers a) {
  const auto n = as<Int64Lanes>(a);
  DoubleLanes x;
  for (std::size_t i = 0; i < 8; ++i) x[i] = static_cast<double>(n[i]);
  return as<Doubles>(x);
}

}  // namespace emulated
ADAPMIXED_CORE_END

#define __AVX512F__ 1

#define __m512 emulated::Floats
#define __m512d emulated::Doubles
#define __m512i emulated::Integers

// The compiler defines these as macros if it does not optimise.
#undef _mm512_cmp_pd_mask
#undef _mm512_cmp_ps_mask
#undef _mm512_extractf32x8_ps
#undef _mm512_insertf32x8
#undef _mm512_reduce_pd
#undef _mm512_roundscale_pd
#undef _mm512_slli_epi32
#undef _mm512_slli_epi64
#undef _mm512_srai_epi64

#define _mm512_abs_pd emulated::abs_pd
#define _mm512_abs_ps emulated::abs_ps
#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_add_epi64 emulated::add_epi64
#define _mm512_add_pd emulated::add_pd
#define _mm512_add_ps emulated::add_ps
#define _mm512_castpd_si512 emulated::castpd_si512
#define _mm512_castps256_ps512 emulated::castps256_ps512
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_castps_si512 emulated::castps_si512
#define _mm512_castsi512_pd emulated::castsi512_pd
#define _mm512_castsi512_ps emulated::castsi512_ps
#define _mm512_cmp_pd_mask(a, b, predicate) emulated::cmp_pd_mask<predicate>(a, b)
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::cmp_ps_mask<predicate>(a, b)
#define _mm512_cvtepi64_pd emulated::cvtepi64_pd
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu32_pd emulated::cvtepu32_pd
#define _mm512_cvtpd_ps emulated::cvtpd_ps
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_pd emulated::cvtps_pd
#define _mm512_div_pd emulated::div_pd
#define _mm512_div_ps emulated::div_ps
#define _mm512_extractf32x8_ps(a, half) emulated::extractf32x8_ps<half>(a)
#define _mm512_fmadd_pd emulated::fmadd_pd
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_fmsub_pd emulated::fmsub_pd
#define _mm512_fmsub_ps emulated::fmsub_ps
#define _mm512_fnmadd_ps emulated::fnmadd_ps
#define _mm512_insertf32x8(a, b, half) emulated::insertf32x8<half>(a, b)
#define _mm512_loadu_pd emulated::loadu_pd
#define _mm512_loadu_ps emulated::loadu_ps
#define _mm512_loadu_si512 emulated::loadu_si512
#define _mm512_mask_blend_pd emulated::mask_blend_pd
#define _mm512_mask_blend_ps emulated::mask_blend_ps
#define _mm512_max_pd emulated::max_pd
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_pd emulated::min_pd
#define _mm512_min_ps emulated::min_ps
#define _mm512_mul_pd emulated::mul_pd
#define _mm512_mul_ps emulated::mul_ps
#define _mm512_permutex2var_epi64 emulated::permutex2var_epi64
#define _mm512_rcp14_ps emulated::rcp14_ps
#define _mm512_reduce_pd(a, mode) emulated::reduce_pd<mode>(a)
#define _mm512_roundscale_pd(a, mode) emulated::roundscale_pd<mode>(a)
#define _mm512_scalef_pd emulated::scalef_pd
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi64 emulated::set1_epi64
#define _mm512_set1_pd emulated::set1_pd
#define _mm512_set1_ps emulated::set1_ps
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_slli_epi64 emulated::slli_epi64
#define _mm512_sqrt_pd emulated::sqrt_pd
#define _mm512_srai_epi64 emulated::srai_epi64
#define _mm512_storeu_pd emulated::storeu_pd
#define _mm512_storeu_ps emulated::storeu_ps
#define _mm512_sub_epi64 emulated::sub_epi64
#define _mm512_sub_pd emulated::sub_pd
#define _mm512_sub_ps emulated::sub_ps
