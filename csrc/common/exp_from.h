// e^{z - m} in double for many z and one m: most of the work of a log-sum-exp.
#pragma once

#include "common/several.h"
#include "common/simd.h"
#include "common/sixteenths.h"

ADAPMIXED_CORE_BEGIN

class ExpFrom {
 public:
  explicit ExpFrom(double m) : m_(m), scaled_(m * kScale) {
#if defined(__AVX512F__)
    std::uint64_t bits[kRoots];
    for (int j = 0; j < kRoots; ++j) bits[j] = root_bits(kRootValues[j], j);
    low_ = _mm512_loadu_si512(bits);
    high_ = _mm512_loadu_si512(bits + 8);
#endif
  }

  // origin() is the rounded m that is subtracted. lost() = m - origin() is more accurate than the
  // computed difference would be.
  double origin() const { return scaled_ / kScale; }
  double lost() const { return std::fma(m_, kScale, -scaled_) / kScale; }

  // Requires |z - m| <= 602; NaN gives NaN.
  template <int kWays>
  ADAPMIXED_INLINE Several<Vec, kWays> exp(const Several<Vec, kWays>& z) const {
#if defined(__AVX512F__)
    Several<Vec, kWays> f, scale;
    ADAPMIXED_UNROLL
    for (int k = 0; k < kWays; ++k) {
      const Vec t = _mm512_fmsub_pd(z.v[k].v, _mm512_set1_pd(kScale), _mm512_set1_pd(scaled_));
      const Vec shifted = t + Vec(kShifter);
      const __m512i n = _mm512_castpd_si512(shifted.v);
      f.v[k] = _mm512_reduce_pd(t.v, _MM_FROUND_TO_NEAREST_INT);
      scale.v[k] = _mm512_castsi512_pd(
          _mm512_add_epi64(_mm512_permutex2var_epi64(low_, n, high_), _mm512_slli_epi64(n, 48)));
    }
    return vfma(scale * f, sixteenth_slope(f), scale);
#else
    // 2^t = 2^n 2^f with |f| <= 1/2, by a polynomial with an error of 4e-16.
    using Many = Several<Vec, kWays>;
    const Many t = vfma(z, Many(kScale), Many(-scaled_));
    const Many shifted = t + Many(kShifter);
    const Many f = t - (shifted - Many(kShifter));
    Many p(7.072585949269223e-9);
    p = vfma(p, f, Many(1.0208690299958306e-7));
    p = vfma(p, f, Many(1.321544258792169e-6));
    p = vfma(p, f, Many(1.5252657260200837e-5));
    p = vfma(p, f, Many(1.540353044173605e-4));
    p = vfma(p, f, Many(1.3333558230164974e-3));
    p = vfma(p, f, Many(9.618129107606888e-3));
    p = vfma(p, f, Many(5.550410866444772e-2));
    p = vfma(p, f, Many(0.24022650695910097));
    p = vfma(p, f, Many(0.69314718055995));
    return add_exponent(vfma(p, f, Many(1.0)), shifted);
#endif
  }

 private:
  static constexpr double kShifter = 6755399441055744.0;  // 1.5 * 2^52: the low bits hold n
  double m_, scaled_;
#if defined(__AVX512F__)
  static constexpr double kScale = kSixteenths;
  __m512i low_, high_;
#else
  static constexpr double kScale = kLog2e;
#endif
};

ADAPMIXED_CORE_END
