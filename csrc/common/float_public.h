// Of a public row in single precision, what the float kernels read: q, and a of the tokens.
#pragma once

#include <cmath>

#include "common/elementary.h"
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

ADAPMIXED_CORE_END
