// lse = log sum_v exp(z_v) of one row: in double, or faster within kFloatLseError.
#pragma once

#include <cmath>

#include "core/elementary.h"
#include "cpu/rows.h"

ADAPMIXED_CORE_BEGIN

template <Dtype D>
void log_sum_exp_row(const char* data, std::int64_t vocab, double* lse, std::int32_t* status) {
  Vec largest(-HUGE_VAL);
  Mask nan = Vec(0.0).is_nan();
  for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
    const Vec z = load_logits<D>(data, v, vocab);
    nan = nan | z.is_nan();
    largest = vmax(z, largest);
  }
  const double m = maximum(largest);
  *lse = std::nan("");
  if (nan.any()) {
    *status = kRowNan;
  } else if (m == HUGE_VAL) {
    *status = kRowPlusInf;
  } else if (m == -HUGE_VAL) {
    *status = kRowEmpty;
  } else if (std::fabs(m) > kMaxLogit) {
    *status = kRowTooLarge;
  } else {
    Vec total(0.0);
    for (std::int64_t v = 0; v < vocab; v += Vec::kLanes) {
      total = total + exp_(load_logits<D>(data, v, vocab) - Vec(m));
    }
    *lse = m + std::log(sum(total));
    *status = kRowOk;
  }
}

// Relative error of the sum: 6 units (kFloatUnit) of each exponential, and 1.3 units of |z - m|, in
// the mean over p at most 17 nats: below m by the entropy, above by what the total may be.
constexpr double kFloatLseError = 1.7e-6;

// NaN where the row needs the exact way: NaN, inf or huge logits, or `reference` far from the
// largest logit. `reference`: a logit of this row that is likely to be among the large ones.
template <Dtype D>
double float_log_sum_exp(const char* data, std::int64_t vocab, double reference) {
  if (!(std::fabs(reference) < 1e4)) return std::nan("");
  const auto m = static_cast<float>(reference);
  const Flt lowest(m - 87.0f), base(m);
  const auto term = [&](Flt z) {
    const Flt t = vmax(lowest, z) - base;  // NaN, the second operand, passes
    const Flt shifted = vfma(t, Flt(kFloatLog2e), Flt(kFloatShifter));
    const Flt n = shifted - Flt(kFloatShifter);
    const Flt scale = exp2_integer(n, shifted);
    return vfma(scale, exp2_minus_one(vfms(t, Flt(kFloatLog2e), n)), scale);
  };
  constexpr std::int64_t kGroup = 8 * Flt::kLanes;
  Vec low(0.0), high(0.0);
  const auto add = [&](Flt group) {
    low = low + low_half(group);
    high = high + high_half(group);
  };
  std::int64_t v = 0;
  for (; v + kGroup <= vocab; v += kGroup) {
    for (std::int64_t line = 0; line < kGroup * kElementSize<D>; line += 64) {
      __builtin_prefetch(data + (v + 16 * kGroup) * kElementSize<D> + line);
    }
    Flt terms[8];
    ADAPMIXED_UNROLL
    for (int k = 0; k < 8; ++k) terms[k] = term(load_whole<D>(data, v + k * Flt::kLanes));
    add(((terms[0] + terms[1]) + (terms[2] + terms[3])) +
        ((terms[4] + terms[5]) + (terms[6] + terms[7])));
  }
  for (; v < vocab; v += Flt::kLanes) add(term(load_floats<D>(data, v, vocab)));
  const double total = sum(low + high);
  return total < 0x1p24 ? m + std::log(total) : std::nan("");  // also where it is NaN
}

ADAPMIXED_CORE_END
