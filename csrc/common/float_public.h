// One public row in single precision, in the form that the float kernels read.
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

struct FloatPublic {
  double lse;
  std::int64_t vocab;
  const char* data;  // the row itself, for single tokens in double
  float* logits;     // for scores: padded to whole vectors, NaN if masked or past the end
  // For ratios instead: a of the tokens in two parts, and q. q is 0 if masked or past the end.
  float *grid, *rest, *q;
  std::int32_t* masked;
  std::int64_t masked_count;
  std::int64_t top;    // the most likely token
  double largest;      // the largest finite |logit|
  double least_log_q;  // the least log q of a token that is not masked

  static std::int64_t scratch_size(std::int64_t vocab) {  // in doubles
    return 2 * round_up(vocab, 64);
  }

  template <Dtype D>
  void load(const Row& row, double row_lse, std::int64_t row_vocab, bool for_ratios,
            double* memory) {
    lse = row_lse, vocab = row_vocab, data = row.data;
    const std::int64_t padded = round_up(vocab, 64);
    logits = grid = reinterpret_cast<float*>(memory);
    rest = grid + padded;
    q = rest + padded;
    masked = reinterpret_cast<std::int32_t*>(q + padded);
    masked_count = 0;
    const Flt none(-HUGE_VALF);
    Flt high = none, low(HUGE_VALF);
    for (std::int64_t v = 0; v < padded; v += Flt::kLanes) {
      const Flt z = load_floats<D>(data, v, vocab);
      const auto present = z > none;
      high = vmax(high, z);
      low = vmin(low, vselect(present, z, Flt(HUGE_VALF)));
      if (for_ratios) {
        const Vec shift(lse);
        const Flt read = vselect(present, z, Flt(static_cast<float>(lse)));
        const FloatTokens a = float_tokens(low_half(read), high_half(read));
        a.grid.store(grid + v), a.rest.store(rest + v);
        const Flt exponential = float_exp(low_half(z) - shift, high_half(z) - shift);
        vselect(present, exponential, Flt(0.0f)).store(q + v);
      } else {
        vselect(present, z, Flt(NAN)).store(logits + v);
      }
      const unsigned missing = present.bits() ^ kAllLanes;
      for (int lane = 0; missing != 0 && lane < Flt::kLanes; ++lane) {
        if ((missing >> lane & 1u) && v + lane < vocab) {
          masked[masked_count++] = static_cast<std::int32_t>(v + lane);
        }
      }
    }
    const float most = maximum(high), least = -maximum(Flt(0.0f) - low);
    largest = std::fmax(std::fabs(most), std::fabs(least));
    least_log_q = least - lse;
    top = 0;
    while (!(row.at(top) == static_cast<double>(most))) ++top;
  }

  // Returns whether this private row has a token that the public row masks.
  bool uncovers(const Row& private_row) const {
    for (std::int64_t k = 0; k < masked_count; ++k) {
      if (private_row.at(masked[k]) > -HUGE_VAL) return true;
    }
    return false;
  }

 private:
  static constexpr unsigned kAllLanes = (1u << Flt::kLanes) - 1;
};

ADAPMIXED_CORE_END
