// One row's share S(s) = sum clip(s p, c q, C q) in double: from its exponentials, kept from the
// pass that sums them, or from logarithms, which serve every input. Sums to be 1 are here as far
// from it as the sum of q is: what rounding its log-sum-exp costs is a factor of all distributions
// of the position then, and no error of s.
#pragma once

#include <cmath>

#include "core/clipping.h"
#include "cpu/row_sums.h"

ADAPMIXED_CORE_BEGIN

// The public row as all private rows of its position read it; padded to whole groups with q = 0.
struct ClipPublic {
  static constexpr std::int64_t kGroup = 4 * Vec::kLanes;

  Row row;
  double lse;
  std::int64_t vocab, padded;
  double *q, *inverse;  // 1 / q, 0 where q is too small to have one
  double missing;       // 1 - sum q
  std::int64_t top;     // the most likely token
  // The likely tokens, from which the rows guess s: what they weigh, and the rest of q.
  static constexpr double kLikely = 1.0 / 4096;
  static constexpr std::int64_t kMostLikely = 4096 + kGroup;
  double* likely_q;
  std::int32_t* likely;
  std::int64_t likely_count;
  double unlikely;

  static std::int64_t block_end(std::int64_t v, std::int64_t end) {
    return v + kSumBlock < end ? v + kSumBlock : end;
  }

  static constexpr std::int64_t kPadding = 32;
  static std::int64_t padding(std::int64_t vocab) { return round_up(vocab, kPadding); }
  static std::int64_t scratch_size(std::int64_t vocab) {
    return 2 * padding(vocab) + kMostLikely + kMostLikely / 2;
  }

  template <Dtype D>
  void load(const Row& public_row, double public_lse, std::int64_t row_vocab, double* memory) {
    row = public_row, lse = public_lse, vocab = row_vocab, padded = padding(vocab);
    q = memory, inverse = q + padded;
    double largest = -1.0;
    for (std::int64_t v = 0; v < padded; v += Vec::kLanes) {
      const Vec here = v < vocab ? exp_(load_logits<D>(row.data, v, vocab) - Vec(lse)) : Vec(0.0);
      here.store(q + v);
      vselect(here > Vec(1e-300), Vec(1.0) / here, Vec(0.0)).store(inverse + v);
    }
    missing = 1.0 - total_of_q();
    likely_q = inverse + padded, likely = reinterpret_cast<std::int32_t*>(likely_q + kMostLikely);
    likely_count = 0, unlikely = 1.0;
    for (std::int64_t v = 0; v < vocab; ++v) {
      if (q[v] > largest) largest = q[v], top = v;
      if (q[v] < kLikely || likely_count == 4096) continue;
      unlikely -= q[v];
      likely_q[likely_count] = q[v];
      likely[likely_count++] = static_cast<std::int32_t>(v);
    }
    unlikely = std::fmax(unlikely, 0.0);
  }

 private:
  double total_of_q() const {
    double total = 0.0;
    for (std::int64_t v = 0; v < padded;) {
      Vec part[4] = {Vec(0.0), Vec(0.0), Vec(0.0), Vec(0.0)};
      for (const std::int64_t end = block_end(v, padded); v < end; v += kGroup) {
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
    return ClipPublic::padding(vocab) + 2 * ClipPublic::kMostLikely;
  }

  ClippedRow(const ClipPublic& q, double lower, double upper, double* memory)
      : q_(q), lower_(lower), upper_(upper), values_(memory) {}

  // Keeps e^{z - m} / q with m the logit of the public row's most likely token; the log-sum-exp, or
  // NaN where that does not do.
  template <Dtype D>
  double load_exponentials(const Row& row) {
    const double reference = row.at(q_.top);
    for (std::int64_t v = q_.padded - ClipPublic::kPadding; v < q_.padded; ++v) values_[v] = 0.0;
    const double lse = log_sum_exp_near<D>(row.data, q_.vocab, reference,
                                           [&](std::int64_t v, Vec low, Vec high) ADAPMIXED_INLINE {
                                             const double* inverse = q_.inverse + v;
                                             const Vec a = low * Vec::load(inverse);
                                             const Vec b = high * Vec::load(inverse + Vec::kLanes);
                                             a.store(values_ + v);
                                             b.store(values_ + v + Vec::kLanes);
                                           });
    offset_ = (reference - lse) - ExpFrom(reference).lost();
    return lse;
  }

  // S and what q misses, where no e^{z - m} that was cut off can matter.
  ClipSums of_exponentials(double log_s) const {
    return with_missing(sums(Kept{values_}, q_.q, q_.padded, std::exp(log_s + offset_)));
  }
  // Up to here s p stays in range, and s e^{z - m} of what was cut off is nothing.
  static constexpr double kMostScale = 300.0;

  // Where log s is likely to be: the solution with all unlikely tokens taken for one.
  double guess() const {
    double *r = values_ + q_.padded, *q = r + ClipPublic::kMostLikely, rest = 1.0;
    std::int64_t count = q_.likely_count;
    const double unit = std::exp(offset_);
    for (std::int64_t k = 0; k < count; ++k) {
      r[k] = values_[q_.likely[k]];
      q[k] = q_.likely_q[k];
      rest -= unit * r[k] * q[k];
    }
    r[count] = q_.unlikely > 0.0 ? std::fmax(rest, 0.0) / unit / q_.unlikely : 0.0;
    q[count++] = q_.unlikely;
    for (; count % ClipPublic::kGroup != 0; ++count) r[count] = q[count] = 0.0;
    double log_s = 0.0;
    const auto rough = [&](double at) { return sums(Kept{r}, q, count, std::exp(at + offset_)); };
    return solve_clip_scale(rough, lower_, 50.0, &log_s, 1e-4) ? log_s : 0.0;
  }

  // p_bar / q from what load_exponentials keeps.
  auto ratios(double log_s) const {
    const Vec scale(std::exp(log_s + offset_)), low(lower_), high(upper_);
    return [=, values = values_](std::int64_t v)
               ADAPMIXED_INLINE { return vmin(high, vmax(low, scale * Vec::load(values + v))); };
  }

  // Keeps t = log p/q, -inf where p = 0; q of the tokens that p has, and of the others.
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
        // As mixture takes p and q: the difference of two large log-sum-exps would be rounded.
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
    const auto ratio = [values = values_, shift = Vec(log_s)](std::int64_t v)
                           ADAPMIXED_INLINE { return exp_(Vec::load(values + v) + shift); };
    return with_missing(sums(ratio, q_.q, q_.padded, 1.0));
  }

  auto ratios_of_logarithms(double log_s, double residual) const {
    const Vec none(-HUGE_VAL), low(lower_), high(upper_), shift(log_s), rest(residual);
    return [=, values = values_](std::int64_t v) ADAPMIXED_INLINE {
      const Vec t = Vec::load(values + v);
      return vselect(t > none, vmin(high, vmax(low, exp_(t + shift))), rest);
    };
  }

 private:
  ClipSums with_missing(const ClipSums& of_rows) const {
    return {of_rows.total + q_.missing, of_rows.moving};
  }

  struct Kept {
    const double* values;
    Vec operator()(std::int64_t v) const { return Vec::load(values + v); }
  };

  // S over tokens of these q, `ratio(v)` times `factor` their s p/q.
  template <class Ratio>
  ClipSums sums(const Ratio& ratio, const double* q, std::int64_t count, double factor) const {
    constexpr int kWays = 4;
    const Vec lower(lower_ / factor), upper(upper_ / factor), zero(0.0);
    ClipSums result{0.0, 0.0};
    for (std::int64_t v = 0; v < count;) {
      Vec total[kWays], moving[kWays];
      for (int k = 0; k < kWays; ++k) total[k] = moving[k] = zero;
      const std::int64_t end = ClipPublic::block_end(v, count);
      for (; v < end; v += ClipPublic::kGroup) {
        ADAPMIXED_UNROLL
        for (int k = 0; k < kWays; ++k) {
          const std::int64_t at = v + k * Vec::kLanes;
          const Vec r = ratio(at), clipped = vmin(upper, vmax(lower, r));
          const Vec x = Vec::load(q + at) * clipped;
          total[k] = total[k] + x;
          moving[k] = moving[k] + vselect(clipped == r, x, zero);
        }
      }
      result.total += sum(total[0] + total[1] + (total[2] + total[3]));
      result.moving += sum(moving[0] + moving[1] + (moving[2] + moving[3]));
    }
    return {factor * result.total, factor * result.moving};
  }

  const ClipPublic& q_;
  double lower_, upper_;
  double* values_;
  double offset_ = 0.0;
};

ADAPMIXED_CORE_END
