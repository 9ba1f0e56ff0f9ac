// What the float kernels compute of rows: e^u and a = z L of some tokens, and log sum_v e^{z_v} of
// a row. That is enough for the pool's log-ratios, which are clipped and rounded whatever it is
// (log_pool/formula.h).
#pragma once

#include <cmath>

#include "common/elementary.h"
#include "common/float_ratio.h"
#include "common/rows.h"

ADAPMIXED_CORE_BEGIN

// e^u within 3 units for -80 <= u <= 80. The argument is reduced in double, which is exact enough
// for floats. For u < -80, also u = -inf, the result is a positive number below 1e-34. NaN stays
// NaN.
inline Flt float_exp(Vec low, Vec high) {
  const Vec least(-120.0), octave(kOctave);
  low = vmax(least, low * Vec(kLog2e)), high = vmax(least, high * Vec(kLog2e));
  const Vec n_low = vround(low), n_high = vround(high);
  const Flt f = narrow((low - n_low) * octave, (high - n_high) * octave);
  const Flt scale = exp2_integer(narrow(n_low, n_high) + Flt(kFloatShifter));
  return vfma(scale, octave_minus_one(f), scale);
}

// a = z L of several tokens in two parts (common/float_ratio.h).
struct FloatTokens {
  Flt grid, rest;
};
inline FloatTokens float_tokens(Vec low, Vec high) {
  const Vec scale(static_cast<double>(kOctavesPerNat));
  low = low * scale, high = high * scale;
  const Vec grid_low = on_grid(low), grid_high = on_grid(high);
  return {narrow(grid_low, grid_high), narrow(low - grid_low, high - grid_high)};
}

// e^{z - m} of many z, with m on the grid of common/float_ratio.h. The error is within 3 units
// (kFloatUnit), as for `probability` there. z is clamped to [m - 80, m + 60]. NaN gives NaN.
class FloatExpFrom {
 public:
  explicit FloatExpFrom(double m)
      : m_(static_cast<float>(on_grid(m * kOctavesPerNat))),
        lowest_(static_cast<float>(m - 80.0)),
        highest_(static_cast<float>(m + 60.0)) {}

  double origin() const { return m_ / static_cast<double>(kOctavesPerNat); }

  ADAPMIXED_INLINE Quad exp(Quad z) const {
    Quad octaves, shifted;
    ADAPMIXED_UNROLL
    for (int k = 0; k < Quad::kSize; ++k) {
      // A NaN passes, being the second operand of both.
      z.v[k] = vmin(Flt(highest_), vmax(Flt(lowest_), z.v[k]));
      octaves.v[k] = vfms(z.v[k], Flt(kOctavesPerNat), Flt(m_));
      shifted.v[k] = vfma(octaves.v[k], Flt(kOctaveInverse), Flt(kFloatShifter));
      const Flt n = shifted.v[k] - Flt(kFloatShifter);
      octaves.v[k] = vfms(z.v[k], Flt(kOctavesPerNat), vfma(n, Flt(kOctave), Flt(m_)));
    }
    Quad e;
    const Quad p = octave_minus_one(octaves);
    ADAPMIXED_UNROLL
    for (int k = 0; k < Quad::kSize; ++k) {
      const Flt scale = exp2_integer(shifted.v[k]);
      e.v[k] = vfma(scale, p.v[k], scale);
    }
    return e;
  }

 private:
  float m_, lowest_, highest_;
};

// The log-sum-exp, given one logit of the row. The error is within 5.3 units, two of them from the
// additions: 3.2e-7. NaN if this logit is not finite or too large for floats, or if another one is
// NaN or far above it.
template <Dtype D>
double float_log_sum_exp(const char* data, std::int64_t vocab, double reference) {
  if (!(std::fabs(reference) < kFloatLargest)) return NAN;
  const FloatExpFrom from(reference);
  Vec low(0.0), high(0.0);
  for (std::int64_t v = 0; v < vocab; v += Quad::kLanes) {
    const Quad e = from.exp(load_quad<D>(data, v, vocab));
    const Flt four = (e.v[0] + e.v[1]) + (e.v[2] + e.v[3]);
    low = low + low_half(four);
    high = high + high_half(four);
  }
  const double lse = from.origin() + std::log(sum(low + high));
  return lse - reference < 50.0 ? lse : NAN;
}

ADAPMIXED_CORE_END
