// The sum S(s) = sum clip(s p, c q, C q) of one row in double: from exponentials kept by the pass
// that sums them, or from logarithms, which serve every input. The rounding of the public
// log-sum-exp makes sum q differ from 1, and 1 - sum q is added to S. So this rounding scales all
// distributions of the position alike and causes no error of s.
#pragma once

#include <cmath>

#include "clip/cpu_public.h"

ADAPMIXED_CORE_BEGIN

class ClippedRow {
 public:
  static std::int64_t scratch_size(std::int64_t vocab) {
    const std::int64_t padded = ClipPublic::padding(vocab);
    return padded + ClipPublic::sample_size(vocab) + ClipBracket::scratch_size(padded);
  }

  ClippedRow(const ClipPublic& q, double lower, double upper, double* memory)
      : q_(q),
        box_{lower, upper},
        values_(memory),
        sampled_(values_ + q.padded),
        bracket_(values_, q.q, q.padded, q.missing, box_,
                 sampled_ + ClipPublic::sample_size(q.vocab)) {}

  // Keeps e^{z - m}, where m is this row's logit of the public row's most likely token. Returns the
  // log-sum-exp, or NaN if m is too far from it or the row has a status.
  template <Dtype D>
  double load_exponentials(const Row& row) {
    const double reference = row.at(q_.top);
    for (std::int64_t v = q_.padded - ClipPublic::kPadding; v < q_.padded; ++v) values_[v] = 0.0;
    const double lse = log_sum_exp_near<D>(row.data, q_.vocab, reference,
                                           [&](std::int64_t v, Vec low, Vec high) ADAPMIXED_INLINE {
                                             low.store(values_ + v);
                                             high.store(values_ + v + Vec::kLanes);
                                           });
    offset_ = (reference - lse) - ExpFrom(reference).lost();
    return lse;
  }

  // Finds log s from the exponentials. Returns false if one that was cut off might matter.
  bool solve_exponentials(double* log_s) {
    const double width = guess(log_s);
    if (bracketed(log_s, width)) {
      const auto near = [&](double at) { return bracket_(factor(at)); };
      return solve_clip_scale(near, box_.lower, kMostKeptScale, log_s);
    }
    const auto whole = [&](double at) {
      return with_missing(clip_sums(Kept{values_}, q_.q, q_.padded, box_, factor(at)));
    };
    return solve_clip_scale(whole, box_.lower, kMostKeptScale, log_s);
  }

  // p_bar / q from the exponentials.
  auto ratios(double log_s) const {
    const Vec scale(factor(log_s)), low(box_.lower), high(box_.upper);
    return [=, values = values_, inverse = q_.inverse](std::int64_t v) ADAPMIXED_INLINE {
      const Vec ratio = Vec::load(values + v) * Vec::load(inverse + v);
      return vmin(high, vmax(low, scale * ratio));
    };
  }

  // Keeps t = log p/q, or -inf if p counts as 0. Returns q of the tokens with p > 0 and of the
  // others.
  template <Dtype D>
  void load_logarithms(const Row& row, double lse, double& covered, double& uncovered) {
    const Vec p_lse(lse), q_lse(q_.lse), none(-HUGE_VAL);
    Vec with(0.0), without(0.0);
    covered = uncovered = 0.0;
    for (std::int64_t v = 0; v < q_.padded; v += Vec::kLanes) {
      if (v % kSumBlock == 0) {
        covered += sum(with), uncovered += sum(without);
        with = without = Vec(0.0);
      }
      const Vec q = Vec::load(q_.q + v);
      Vec t = none;
      if (v < q_.vocab) {
        const Vec z0 = load_logits<D>(q_.row.data, v, q_.vocab);
        // In the order in which mixture computes p and q: the difference of two large log-sum-exps
        // would be rounded.
        t = (load_logits<D>(row.data, v, q_.vocab) - p_lse) - (z0 - q_lse);
        t = vselect((z0 > none) & (t >= Vec(kClipAbsent)), t, none);
      }
      const auto has = t > none;
      with = with + vselect(has, q, Vec(0.0));
      without = without + vselect(has, Vec(0.0), q);
      t.store(values_ + v);
    }
    covered += sum(with), uncovered += sum(without);
  }

  ClipSums of_logarithms(double log_s) const {
    const auto e = [values = values_, q = q_.q, shift = Vec(log_s)](std::int64_t v)
                       ADAPMIXED_INLINE {
                         const Vec here = Vec::load(q + v), none(0.0);
                         const Vec ratio = exp_(Vec::load(values + v) + shift);
                         return vselect(here > none, here * ratio, none);  // the ratio may be inf
                       };
    return with_missing(clip_sums(e, q_.q, q_.padded, box_, 1.0));
  }

  auto ratios_of_logarithms(double log_s, double residual) const {
    const Vec none(-HUGE_VAL), low(box_.lower), high(box_.upper), shift(log_s), rest(residual);
    return [=, values = values_](std::int64_t v) ADAPMIXED_INLINE {
      const Vec t = Vec::load(values + v);
      return vselect(t > none, vmin(high, vmax(low, exp_(t + shift))), rest);
    };
  }

 private:
  // The accuracy of the sample's solution, and the number of standard deviations by which s may be
  // off.
  static constexpr double kRough = 1e-4, kDeviations = 2.5;

  double factor(double log_s) const { return std::exp(log_s + offset_); }

  ClipSums with_missing(const ClipSums& of_rows) const {
    return {of_rows.total + q_.missing, of_rows.moving};
  }

  // Guesses log s from the sample. Returns by how much the guess may be off.
  double guess(double* log_s) {
    const ClipPublic::Sample& sample = q_.sample;
    for (std::int64_t k = 0; k < sample.padded; ++k) {
      sampled_[k] = values_[sample.tokens[k]] * sample.weights[k];
    }
    ClipSums last{0.0, 0.0};
    const auto rough = [&](double at) {
      last = clip_sums(Kept{sampled_}, sample.q, sample.padded, box_, factor(at));
      last.total += sample.missing;
      return last;
    };
    *log_s = 0.0;
    if (!solve_clip_scale(rough, box_.lower, 50.0, log_s, kRough)) return HUGE_VAL;
    return (kDeviations * deviation(factor(*log_s)) + kRough) / last.moving;
  }

  // The standard deviation of the sample's S, which comes from the tokens that represent others.
  double deviation(double s) const {
    const ClipPublic::Sample& sample = q_.sample;
    const Vec scale(s / sample.unit), low(box_.lower), high(box_.upper);
    Vec first(0.0), second(0.0);
    std::int64_t k = sample.certain;
    for (; k + Vec::kLanes <= sample.count; k += Vec::kLanes) {  // the rest adds little
      const Vec x = vmin(high, vmax(low, scale * Vec::load(sampled_ + k)));
      first = first + x;
      second = vfma(x, x, second);
    }
    const double drawn = std::fmax(1.0, static_cast<double>(k - sample.certain));
    const double squares = sum(second) - sum(first) * sum(first) / drawn;
    return sample.unit * std::sqrt(std::fmax(0.0, squares));
  }

  // Returns whether s is within `width` of *log_s; if so, improves *log_s.
  bool bracketed(double* log_s, double width) {
    // No token may cross the whole box. If many tokens change sides, the list becomes too long.
    if (!(width < kMostWidth && 4.0 * width < std::log(box_.upper / box_.lower))) return false;
    if (*log_s + width > kMostKeptScale) return false;
    if (!bracket_.narrow(factor(*log_s - width), factor(*log_s + width))) return false;
    const double s = bracket_.estimate(), less = width * width;  // the estimate's likely error
    bracket_.narrow(s * (1.0 - less), s * (1.0 + less));
    *log_s = std::log(bracket_.estimate()) - offset_;
    return true;
  }
  static constexpr double kMostWidth = 0.1;

  const ClipPublic& q_;
  ClipBox box_;
  double *values_, *sampled_;
  ClipBracket bracket_;
  double offset_ = 0.0;
};

ADAPMIXED_CORE_END
