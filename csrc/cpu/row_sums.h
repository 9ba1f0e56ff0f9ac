// lse = log sum_v exp(z_v) of one row, in double.
#pragma once

#include <cmath>

#include "core/elementary.h"
#include "cpu/exp_from.h"
#include "cpu/rows.h"

ADAPMIXED_CORE_BEGIN

// Takes the terms e^{z - m} of a row's tokens from v on, two vectors at a time: nothing is kept.
struct Forget {
  void operator()(std::int64_t, Vec, Vec) const {}
};

// log sum of e^z over a row, by e^{z - m}: within 2e-14 besides the rounding of m itself. Terms
// with |z - m| > 600 are cut off there; NaN where there is a NaN.
template <Dtype D, class Keep = Forget>
double log_sum_from(const char* data, std::int64_t vocab, double m, const Keep& keep = {}) {
  const Flt lowest(static_cast<float>(m - 600.0)), highest(static_cast<float>(m + 600.0));
  const ExpFrom from(m);
  constexpr std::int64_t kGroup = 4 * Flt::kLanes;
  Vec low(0.0), high(0.0);
  const auto add = [&](std::int64_t v, Flt z) ADAPMIXED_INLINE {
    z = vmin(highest, vmax(lowest, z));  // NaN, the second operand, passes
    const Vec e_low = from.exp(low_half(z)), e_high = from.exp(high_half(z));
    keep(v, e_low, e_high);
    low = low + e_low;
    high = high + e_high;
  };
  std::int64_t v = 0;
  for (; v + kGroup <= vocab; v += kGroup) {
    for (std::int64_t line = 0; line < kGroup * kElementSize<D>; line += 64) {
      __builtin_prefetch(data + (v + 32 * kGroup) * kElementSize<D> + line);
    }
    ADAPMIXED_UNROLL
    for (int k = 0; k < 4; ++k) add(v + k * Flt::kLanes, load_whole<D>(data, v + k * Flt::kLanes));
  }
  for (; v < vocab; v += Flt::kLanes) add(v, load_floats<D>(data, v, vocab));
  return from.origin() + std::log(sum(low + high));
}

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
    *lse = log_sum_from<D>(data, vocab, m);
    *status = kRowOk;
  }
}

// The same in one pass, from a logit of this row that is likely to be among the large ones; NaN
// where it was not, or the row has a status.
template <Dtype D, class Keep = Forget>
double log_sum_exp_near(const char* data, std::int64_t vocab, double reference,
                        const Keep& keep = {}) {
  if (!(std::fabs(reference) < 1e4)) return std::nan("");
  const double lse = log_sum_from<D>(data, vocab, reference, keep);
  return lse - reference < 500.0 ? lse : std::nan("");  // also where it is NaN
}

ADAPMIXED_CORE_END
