// Large targets T = e^{(alpha-1) R}: only the few tokens with q r^alpha near T or above can decide.
// One pass over the logits finds them without an exponential; they are then solved in double.
#pragma once

#include <limits>

#include "common/float_public.h"
#include "project/cpu_exact_row.h"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

class ListedRow {
 public:
  static std::int64_t capacity(std::int64_t vocab) { return vocab / 16 + 64; }
  static std::int64_t scratch_size(std::int64_t vocab) {  // in doubles
    return doubles(vocab) + capacity(vocab) / 2 + 16;
  }
  // Returns whether float scores are accurate enough: they find the tokens that matter within half
  // a nat.
  static bool serves(const FloatPublic& q, double order) {
    return order * (q.largest + std::fabs(q.lse)) < 2e5 && q.least_log_q > kWildLogQ;
  }

  ListedRow(const FloatPublic& q, const Row& row, double lse, double order, double log_target,
            double* scratch)
      : q_(q),
        row_(row),
        lse_(lse),
        order_(order),
        log_target_(log_target),
        memory_(scratch),
        indices_(reinterpret_cast<std::int32_t*>(scratch + doubles(q.vocab))),
        listed_(order) {}

  // Makes the list of F or G. Returns false if too many tokens matter.
  bool list(bool reverse, double unlisted) {
    const double s = reverse ? 1.0 - order_ : order_;
    bool fits = false;
    with_dtype(row_.dtype, [&](auto tag) { fits = list<decltype(tag)::value>(s, unlisted); });
    return fits;
  }
  const ExactRow& row() const { return listed_; }

  // Whether one token of the list alone exceeds the target at lambda = 1.
  bool exceeds() const { return exceeds_; }

 private:
  static std::int64_t doubles(std::int64_t vocab) { return 5 * (capacity(vocab) + 16); }

  template <Dtype D>
  bool list(double s, double unlisted) {
    const double shift = lse_ - q_.lse;
    // The score s z + (1 - s) z_0 is computed in floats; half a nat is left for its rounding.
    const double threshold =
        list_threshold(log_target_, unlisted, q_.vocab) + q_.lse + s * shift - 0.5;
    const Flt by_private(static_cast<float>(s)), by_public(static_cast<float>(1.0 - s));
    // A token that this row alone masks has the score +inf in the list of G.
    const Flt least(static_cast<float>(std::fmin(threshold, std::numeric_limits<float>::max())));
    std::int64_t count = 0;
    const std::int64_t most = capacity(q_.vocab);
    const auto take = [&](std::int64_t v, unsigned bits) {
      for (; bits != 0; bits &= bits - 1) {
        const std::int64_t token = v + __builtin_ctz(bits);
        if (count < most) indices_[count] = static_cast<std::int32_t>(token);
        ++count;
      }
    };
    const auto score = [&](std::int64_t v) {
      const Flt z = load_floats<D>(row_.data, v, q_.vocab);
      return vfma(z, by_private, Flt::load(q_.logits + v) * by_public) > least;
    };
    std::int64_t v = 0;
    constexpr std::int64_t kGroup = 4 * Flt::kLanes;
    for (; v + kGroup <= q_.vocab; v += kGroup) {
      FltMask hit[4];
      for (int k = 0; k < 4; ++k) hit[k] = score(v + k * Flt::kLanes);
      if (((hit[0] | hit[1]) | (hit[2] | hit[3])).bits() == 0) continue;
      for (int k = 0; k < 4; ++k) take(v + k * Flt::kLanes, hit[k].bits());
    }
    for (; v < q_.vocab; v += Flt::kLanes) take(v, score(v).bits());
    if (count > most) return false;
    double* log_q = memory_;
    double* t = log_q + round_up(count, 8);
    const Row public_row{q_.data, D};
    exceeds_ = false;
    for (std::int64_t k = 0; k < count; ++k) {
      const double z0 = public_row.at(indices_[k]);
      log_q[k] = z0 - q_.lse;
      t[k] = row_.at(indices_[k]) - z0 - shift;
      exceeds_ = exceeds_ || log_q[k] + s * t[k] > log_target_;
    }
    for (std::int64_t k = count; k < round_up(count, 8); ++k) log_q[k] = -HUGE_VAL, t[k] = 0.0;
    listed_.list(log_q, t, count, log_target_, t + round_up(count, 8));
    return true;
  }

  const FloatPublic& q_;
  const Row row_;
  double lse_, order_, log_target_;
  double* memory_;
  std::int32_t* indices_;
  bool exceeds_ = false;
  ExactRow listed_;
};

ADAPMIXED_CORE_END
