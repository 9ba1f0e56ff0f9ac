// S(s) = sum clip(s e, c q, C q) over tokens, where e is any multiple of p and s has a matching
// scale. The s with S = 1 is found by reading only few tokens more than once.
#pragma once

#include <cmath>

#include "clip/formula.h"
#include "common/row_sums.h"

ADAPMIXED_CORE_BEGIN

struct ClipBox {
  double lower, upper;
};

constexpr std::int64_t kClipGroup = 4 * Vec::kLanes;

// `count` must be a multiple of kClipGroup.
inline ClipSums clip_sums(const double* e, const double* q, std::int64_t count, const ClipBox& box,
                          double s) {
  constexpr int kWays = 4;
  const Vec lower(box.lower / s), upper(box.upper / s), zero(0.0);
  ClipSums result{0.0, 0.0};
  for (std::int64_t v = 0; v < count;) {
    Vec total[kWays], moving[kWays];
    for (int k = 0; k < kWays; ++k) total[k] = moving[k] = zero;
    for (const std::int64_t end = block_end(v, count); v < end; v += kClipGroup) {
      ADAPMIXED_UNROLL
      for (int k = 0; k < kWays; ++k) {
        const Vec here = Vec::load(q + v + k * Vec::kLanes);
        const Vec value = Vec::load(e + v + k * Vec::kLanes);
        const Vec x = vmin(here * upper, vmax(here * lower, value));
        total[k] = total[k] + x;
        moving[k] = moving[k] + vselect(x == value, x, zero);
      }
    }
    result.total += sum(total[0] + total[1] + (total[2] + total[3]));
    result.moving += sum(moving[0] + moving[1] + (moving[2] + moving[3]));
  }
  return {s * result.total, s * result.moving};
}

// Between two ends, S is linear in s except for the tokens that enter or leave the box there. One
// pass sums S at both ends and lists the pairs of vectors with such tokens. S between the ends, and
// at closer ends, then follows from these pairs alone.
class ClipBracket {
 public:
  // Lists hold at most this many tokens.
  static std::int64_t capacity(std::int64_t count) { return round_up(count / 4, kClipGroup); }
  static std::int64_t scratch_size(std::int64_t count) {  // in doubles
    return 2 * capacity(count) + count / kPair + 1;
  }

  // Starts with all tokens; `count` is a multiple of kClipGroup, and missing = 1 - sum q.
  ClipBracket(const double* e, const double* q, std::int64_t count, double missing,
              const ClipBox& box, double* memory)
      : box_(box),
        e_(e),
        q_(q),
        count_(count),
        capacity_(capacity(count)),
        own_e_(memory),
        own_q_(memory + capacity_),
        pairs_(reinterpret_cast<std::int32_t*>(own_q_ + capacity_)),
        rest_low_(missing),
        rest_high_(missing) {}

  // Moves the ends to `low` and `high`. Returns false and changes nothing if S is not 1 between
  // them, or if too many tokens are left. No token may cross the whole box between them. The other
  // members may only be used after this has returned true.
  bool narrow(double low, double high) {
    const Ends at = add_up(low, high);
    const double at_low = rest(low) + at.low, at_high = rest(high) + at.high;
    const std::int64_t padded = round_up(at.pairs * kPair, kClipGroup);
    if (!(at_low <= 1.0 && at_high >= 1.0 && at_low < at_high)) return false;
    if (padded > capacity_) return false;
    keep(at.pairs, padded);
    const Ends kept = add_up(low, high);
    rest_low_ = at_low - kept.low, rest_high_ = at_high - kept.high;
    low_ = low, high_ = high;
    estimate_ = low + (1.0 - at_low) / (at_high - at_low) * (high - low);
    return true;
  }

  // The s at which S would be 1 if it were linear.
  double estimate() const { return estimate_; }

  ClipSums operator()(double s) const {
    const ClipSums kept = clip_sums(e_, q_, count_, box_, s);
    return {rest(s) + kept.total, s * (rest_high_ - rest_low_) / (high_ - low_) + kept.moving};
  }

 private:
  static constexpr std::int64_t kPair = 2 * Vec::kLanes;

  struct Ends {
    double low, high;  // S at both ends, over the tokens that are read
    std::int64_t pairs;
  };

  Ends add_up(double low, double high) const {
    const Vec lower(box_.lower / low), upper(box_.upper / low), growth(high / low);
    const double *e = e_, *q = q_;
    Ends ends{0.0, 0.0, 0};
    std::int64_t pairs = 0;
    for (std::int64_t v = 0; v < count_;) {
      Vec at_low[2] = {Vec(0.0), Vec(0.0)}, at_high[2] = {Vec(0.0), Vec(0.0)};
      for (const std::int64_t end = block_end(v, count_); v < end; v += kPair) {
        Mask changes[2];
        ADAPMIXED_UNROLL
        for (int k = 0; k < 2; ++k) {
          const Vec here = Vec::load(q + v + k * Vec::kLanes);
          const Vec value = Vec::load(e + v + k * Vec::kLanes), grown = value * growth;
          const Vec least = here * lower, most = here * upper;
          const Vec a = vmin(most, vmax(least, value)), b = vmin(most, vmax(least, grown));
          at_low[k] = at_low[k] + a;
          at_high[k] = at_high[k] + b;
          changes[k] = (a == value) ^ (b == grown);
        }
        pairs_[pairs] = static_cast<std::int32_t>(v);
        pairs += (changes[0] | changes[1]).any();  // a branch would often be mispredicted
      }
      ends.low += sum(at_low[0] + at_low[1]), ends.high += sum(at_high[0] + at_high[1]);
    }
    return {low * ends.low, low * ends.high, pairs};
  }

  // Keeps the listed pairs alone. They are copied in order, so that none is overwritten before it
  // is read.
  void keep(std::int64_t pairs, std::int64_t padded) {
    const double *e = e_, *q = q_;  // as locals: a store might alias the members
    const std::int32_t* from = pairs_;
    double *own_e = own_e_, *own_q = own_q_;
    for (std::int64_t v = 0; v < pairs * kPair; v += kPair, ++from) {
      for (int half = 0; half < kPair; half += Vec::kLanes) {
        Vec::load(e + *from + half).store(own_e + v + half);
        Vec::load(q + *from + half).store(own_q + v + half);
      }
    }
    for (std::int64_t v = pairs * kPair; v < padded; ++v) own_e[v] = own_q[v] = 0.0;
    e_ = own_e, q_ = own_q, count_ = padded;
  }

  // The part of S from the tokens that are no longer read.
  double rest(double s) const {
    return ((high_ - s) * rest_low_ + (s - low_) * rest_high_) / (high_ - low_);
  }

  ClipBox box_;
  const double *e_, *q_;
  std::int64_t count_, capacity_;
  double *own_e_, *own_q_;
  std::int32_t* pairs_;
  double low_ = 0.0, high_ = 1.0, rest_low_, rest_high_, estimate_ = 0.0;
};

ADAPMIXED_CORE_END
