// One public row in single precision, as the float kernels read it.
#pragma once

#include <cmath>

#include "core/elementary.h"
#include "cpu/rows.h"

ADAPMIXED_CORE_BEGIN

// Tokens with a smaller q are not for floats: r could reach beyond 2^100, and q r^2 leave the
// range.
constexpr double kFloatLogQ = -62.0;

// e^u within 4 units for -80 <= u <= 80, from doubles: the reduction is exact enough for floats.
// Below -80, -inf included, some positive number below 1e-34; NaN stays NaN.
inline Flt float_exp(Vec low, Vec high) {
  const Vec least(-120.0), log2e(1.4426950408889634074);
  low = vmax(least, low * log2e), high = vmax(least, high * log2e);
  const Vec n_low = vround(low), n_high = vround(high);
  const Flt n = narrow(n_low, n_high), f = narrow(low - n_low, high - n_high);
  const Flt scale = exp2_integer(n, n + Flt(kFloatShifter));
  return vfma(scale, exp2_minus_one(f), scale);
}

struct FloatPublic {
  double lse;
  std::int64_t vocab;
  const char* data;  // the row itself, for double arithmetic on single tokens
  float* logits;     // padded to whole vectors; `absent` where masked or past the end
  float* q;          // 0 there; only if wanted
  std::int32_t* masked;
  std::int64_t masked_count;
  std::int64_t top;    // the most likely token
  double largest;      // of the finite |logits|
  double least_log_q;  // of the tokens that are not masked

  static std::int64_t scratch_size(std::int64_t vocab) {  // doubles
    return 3 * round_up(vocab, 64) / 2;
  }

  template <Dtype D>
  void load(const Row& row, double row_lse, std::int64_t row_vocab, bool want_q, float absent,
            double* memory) {
    lse = row_lse, vocab = row_vocab, data = row.data;
    const std::int64_t padded = round_up(vocab, 64);
    logits = reinterpret_cast<float*>(memory);
    q = logits + padded;
    masked = reinterpret_cast<std::int32_t*>(q + padded);
    masked_count = 0;
    const Flt none(-HUGE_VALF);
    Flt high = none, low(HUGE_VALF);
    for (std::int64_t v = 0; v < padded; v += Flt::kLanes) {
      const Flt z = load_floats<D>(data, v, vocab);
      const auto present = z > none;
      high = vmax(high, z);
      low = vmin(low, vselect(present, z, Flt(HUGE_VALF)));
      vselect(present, z, Flt(absent)).store(logits + v);
      if (want_q) {
        const Flt exponential = float_exp(low_half(z) - Vec(lse), high_half(z) - Vec(lse));
        vselect(present, exponential, Flt(0.0f)).store(q + v);
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
    while (!(logits[top] == most)) ++top;
  }

  // Whether this private row has a token that the public one masks.
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
