// The sum S(s) = sum clip(s p, c q, C q) of one row in double, from exponentials kept by the pass
// that sums them. The rounding of the public log-sum-exp makes sum q differ from 1, and 1 - sum q
// is added to S. So this rounding scales all distributions of the position alike and causes no
// error of s.
#pragma once

#include <cmath>
#include <utility>

#include "clip/cpu_sums.h"

ADAPMIXED_CORE_BEGIN

// The public row as the private rows of its position use it, padded to whole groups with q = 0.
struct ClipPublic {
  Row row;
  double lse;
  std::int64_t vocab, padded;
  double *q, *inverse;  // 1 / q, or 0 if q is 0
  double missing;       // 1 - sum q
  std::int64_t top;     // the most likely token

  // The tokens from which rows guess s: every token with q >= unit, and one for every `unit` of the
  // other tokens' mass, which represents that mass. Padded with q = 0.
  struct Sample {
    double unit, missing;                 // missing: 1 - the mass that the sample represents
    std::int64_t certain, count, padded;  // the first `certain` tokens represent only themselves
    std::int32_t* tokens;
    double *weights, *q;  // how many tokens each represents, and their q
  } sample;

  static constexpr std::int64_t kPadding = 32;
  static std::int64_t padding(std::int64_t vocab) { return round_up(vocab, kPadding); }
  static std::int64_t sample_size(std::int64_t vocab) { return padding(units(vocab) + 2); }
  static std::int64_t scratch_size(std::int64_t vocab) {
    return 2 * padding(vocab) + 3 * sample_size(vocab);
  }

  template <Dtype D>
  void load(const Row& public_row, double public_lse, std::int64_t row_vocab, double* memory) {
    row = public_row, lse = public_lse, vocab = row_vocab, padded = padding(vocab);
    q = memory, inverse = q + padded;
    for (std::int64_t v = 0; v < padded; v += Vec::kLanes) {
      const Vec z = v < vocab ? load_logits<D>(row.data, v, vocab) : Vec(-HUGE_VAL), zero(0.0);
      const auto present = z > Vec(-HUGE_VAL);
      const Vec here = vselect(present, exp_(vmax(Vec(kRarestClipped), z - Vec(lse))), zero);
      here.store(q + v);
      vselect(present, Vec(1.0) / here, zero).store(inverse + v);
    }
    missing = 1.0 - total_of_q();
    top = 0;
    for (std::int64_t v = 1; v < vocab; ++v) {
      if (q[v] > q[top]) top = v;
    }
    take_sample(inverse + padded);
  }

 private:
  // More units would cost every row more than the closer guess saves.
  static std::int64_t units(std::int64_t vocab) { return vocab < 1024 ? 256 : vocab / 4; }

  void take_sample(double* memory) {
    const std::int64_t size = sample_size(vocab);
    sample.weights = memory, sample.q = memory + size;
    sample.tokens = reinterpret_cast<std::int32_t*>(memory + 2 * size);
    sample.unit = 1.0 / static_cast<double>(units(vocab));
    sample.missing = 1.0, sample.count = 0;
    const auto take = [&](std::int64_t v, double weight) {
      if (sample.count == units(vocab) + 2) return;  // only if q sums to much more than 1
      sample.tokens[sample.count] = static_cast<std::int32_t>(v);
      sample.weights[sample.count] = weight;
      sample.missing -= sample.q[sample.count++] = weight * q[v];
    };
    for (std::int64_t v = 0; v < vocab; ++v) {
      if (q[v] >= sample.unit) take(v, 1.0);
    }
    sample.certain = sample.count;
    double passed = 0.5 * sample.unit;
    for (std::int64_t v = 0; v < vocab; ++v) {
      if (q[v] >= sample.unit) continue;
      passed += q[v];
      if (passed < sample.unit) continue;
      passed -= sample.unit;
      take(v, sample.unit / q[v]);
    }
    sample.padded = round_up(sample.count, kClipGroup);
    for (std::int64_t k = sample.count; k < sample.padded; ++k) {
      sample.tokens[k] = 0, sample.weights[k] = sample.q[k] = 0.0;
    }
  }

  double total_of_q() const {
    double total = 0.0;
    for (std::int64_t v = 0; v < padded;) {
      Vec part[4] = {Vec(0.0), Vec(0.0), Vec(0.0), Vec(0.0)};
      for (const std::int64_t end = block_end(v, padded); v < end; v += kClipGroup) {
        for (int k = 0; k < 4; ++k) part[k] = part[k] + Vec::load(q + v + k * Vec::kLanes);
      }
      total += sum(part[0] + part[1] + (part[2] + part[3]));
    }
    return total;
  }
};

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

  // Keeps e^{z - m}, where m is this row's logit of the public row's most likely token, or the
  // log-sum-exp if m is too far from it. Returns the log-sum-exp; NaN if the row has a status.
  template <Dtype D>
  double load(const Row& row, std::int32_t* status) {
    double origin = row.at(q_.top);
    for (std::int64_t v = q_.padded - ClipPublic::kPadding; v < q_.padded; ++v) values_[v] = 0.0;
    const auto keep = [&](std::int64_t v, Vec low, Vec high) ADAPMIXED_INLINE {
      low.store(values_ + v);
      high.store(values_ + v + Vec::kLanes);
    };
    double lse = log_sum_exp_near<D>(row.data, q_.vocab, origin, keep);
    if (std::isnan(lse)) {
      log_sum_exp_row<D>(row.data, q_.vocab, &lse, status);
      if (*status != kRowOk) return lse;
      log_sum_from<D>(row.data, q_.vocab, origin = lse, keep);
    }
    offset_ = (origin - lse) - ExpFrom(origin).lost();
    return lse;
  }

  // Finds log s, and what p_bar / q is where p = 0. exactly: p that count as 0 are told from others
  // that are as small, which S does not need while s is moderate.
  template <Dtype D>
  void solve(const Row& row, double lse, bool exactly, double* log_s, double* residual) {
    if (exactly) drop_absent<D>(row, lse);
    *residual = box_.lower;
    const double width = guess(log_s);
    if (bracketed(log_s, width)) {
      const auto near = [&](double at) { return bracket_(factor(at)); };
      if (solve_clip_scale(near, box_.lower, kMostModerate, log_s)) return;
    }
    const auto whole = [&](double at) {
      return with_missing(clip_sums(values_, q_.q, q_.padded, box_, factor(at)));
    };
    if (solve_clip_scale(whole, box_.lower, kMostModerate, log_s)) return;
    const auto [covered, uncovered] = drop_absent<D>(row, lse);
    if (clip_covers_too_little(box_.lower, box_.upper, covered, uncovered)) {
      *log_s = HUGE_VAL;
      *residual = clip_residual(box_.lower, box_.upper, covered, uncovered);
    } else {
      *log_s = 0.0;
      solve_clip_scale(whole, box_.lower, kMostScale, log_s);
    }
  }

  // p_bar / q.
  auto ratios(double log_s, double residual) const {
    const Vec scale(factor(std::fmin(log_s, kMostScale))), low(box_.lower), high(box_.upper);
    const Vec none(0.0), rest(residual);
    return [=, values = values_, inverse = q_.inverse](std::int64_t v) ADAPMIXED_INLINE {
      const Vec value = Vec::load(values + v);
      const Vec ratio = scale * (value * Vec::load(inverse + v));
      return vselect(value > none, vmin(high, vmax(low, ratio)), rest);
    };
  }

 private:
  // The accuracy of the sample's solution, and the number of standard deviations by which s may be
  // off.
  static constexpr double kRough = 1e-4, kDeviations = 2.5;

  // Up to this log s, s times a p that counts as 0 is negligible.
  static constexpr double kMostModerate = 300.0;

  // Sets p to 0 where it counts as that. Returns q of the tokens with p > 0, and of the others.
  template <Dtype D>
  std::pair<double, double> drop_absent(const Row& row, double lse) {
    const Vec least(least_clipped(lse)), none(0.0);
    double covered = 0.0, uncovered = 0.0;
    for (std::int64_t v = 0; v < q_.vocab;) {
      Vec with(0.0), without(0.0);
      for (const std::int64_t end = block_end(v, q_.vocab); v < end; v += Vec::kLanes) {
        const Vec z = load_logits<D>(row.data, v, q_.vocab), q = Vec::load(q_.q + v);
        const auto has = z >= least;
        vselect(has, Vec::load(values_ + v), none).store(values_ + v);
        with = with + vselect(has, q, none);
        without = without + vselect(has, none, q);
      }
      covered += sum(with), uncovered += sum(without);
    }
    return {covered, uncovered};
  }

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
      last = clip_sums(sampled_, sample.q, sample.padded, box_, factor(at));
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
    if (*log_s + width > kMostModerate) return false;
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
