// lse = log sum_v exp(z_v) of one row, in double.
#pragma once

#include <cmath>

#include "common/elementary.h"
#include "common/exp_from.h"
#include "common/rows.h"

ADAPMIXED_CORE_BEGIN

// Partial sums are closed after this many tokens: the error of one chain of additions grows with
// its length.
constexpr std::int64_t kSumBlock = 2048;
inline std::int64_t block_end(std::int64_t v, std::int64_t end) {
  return v + kSumBlock < end ? v + kSumBlock : end;
}

// A callback for the terms e^{z - m} of tokens v on, two vectors at a time, that keeps nothing.
struct Forget {
  void operator()(std::int64_t, Vec, Vec) const {}
};

// The log of the sum of e^z over a row, from the terms e^{z - m}. The error is within 2e-14,
// besides the rounding of m itself. z is clamped to about m - 601 and m + 600; a NaN gives NaN.
template <Dtype D, class Keep = Forget>
double log_sum_from(const char* data, std::int64_t vocab, double m, const Keep& keep = {}) {
  const Flt lowest(static_cast<float>(m - 601.0)), highest(static_cast<float>(m + 600.0));
  const ExpFrom from(m);
  Vec total(0.0), low(0.0), high(0.0);
  const auto add = [&](std::int64_t v, auto... z) ADAPMIXED_INLINE {
    Several<Vec, 2 * sizeof...(z)> e;
    int at = 0;  // a NaN passes, being the second operand of both
    ((z = vmin(highest, vmax(lowest, z)), e.v[at++] = low_half(z), e.v[at++] = high_half(z)), ...);
    e = from.exp(e);
    ADAPMIXED_UNROLL
    for (int k = 0; k < at; k += 2) {
      keep(v + k / 2 * Flt::kLanes, e.v[k], e.v[k + 1]);
      low = low + e.v[k];
      high = high + e.v[k + 1];
    }
  };
  std::int64_t v = 0;
  for (; v + Quad::kLanes <= vocab; v += Quad::kLanes) {
    if (v % kSumBlock == 0) {
      total = total + (low + high);
      low = high = Vec(0.0);
    }
    const Quad z = load_quad<D>(data, v, vocab);
    add(v, z.v[0], z.v[1]);
    add(v + 2 * Flt::kLanes, z.v[2], z.v[3]);
  }
  for (; v < vocab; v += Flt::kLanes) add(v, load_floats<D>(data, v, vocab));
  return from.origin() + std::log(sum(total + (low + high)));
}

// The largest logit of a row; a NaN may be left out.
template <Dtype D>
double largest_logit(const char* data, std::int64_t vocab) {
  Quad largest(-HUGE_VAL);
  for (std::int64_t v = 0; v < vocab; v += Quad::kLanes) {
    largest = vmax(load_quad<D>(data, v, vocab), largest);
  }
  return maximum(vmax(vmax(largest.v[0], largest.v[1]), vmax(largest.v[2], largest.v[3])));
}

template <Dtype D>
void log_sum_exp_row(const char* data, std::int64_t vocab, double* lse, std::int32_t* status) {
  const double m = largest_logit<D>(data, vocab);
  *lse = std::fabs(m) > kMaxLogit ? std::nan("") : log_sum_from<D>(data, vocab, m);
  *status = kRowOk;
  if (!std::isnan(*lse)) return;
  const Row row{data, D};
  bool nan = false;
  for (std::int64_t v = 0; v < vocab; ++v) nan |= std::isnan(row.at(v));
  *status = nan ? kRowNan : m == HUGE_VAL ? kRowPlusInf : m == -HUGE_VAL ? kRowEmpty : kRowTooLarge;
}

// The same in one pass, given a logit of this row that is likely to be among the largest. Returns
// NaN if it was not, or if the row has a status.
template <Dtype D, class Keep = Forget>
double log_sum_exp_near(const char* data, std::int64_t vocab, double reference,
                        const Keep& keep = {}) {
  if (!(std::fabs(reference) < 1e4)) return std::nan("");
  const double lse = log_sum_from<D>(data, vocab, reference, keep);
  return lse - reference < 500.0 ? lse : std::nan("");  // NaN stays NaN
}

ADAPMIXED_CORE_END
