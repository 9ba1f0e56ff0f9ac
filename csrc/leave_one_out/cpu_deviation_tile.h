// A tile of one position's vocabulary: the deviations of all models (cpu_deviations.h), and the
// numbers per token that the models share.
#pragma once

#include "leave_one_out/bound.h"
#include "leave_one_out/cpu_deviations.h"
#include "leave_one_out/cpu_plan.h"
#include "leave_one_out/cpu_token_models.h"

ADAPMIXED_CORE_BEGIN

class DeviationTile {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) {  // in doubles
    return 4 * plan.tile() + Deviations::scratch_size(plan.models) +
           TokenModels::scratch_size(plan.models) + 2 * kMostRare +
           (plan.models + kColumns) * plan.tile() / 2;
  }

  DeviationTile(const Ensemble& in, const Weights& weights, const LossPlan& plan, double reach,
                std::int64_t position, Arithmetic arithmetic, double* memory)
      : in_(in),
        weights_(weights),
        plan_(plan),
        arithmetic_(arithmetic),
        reach_(reach),
        position_(position),
        tile_(plan.tile()),
        rows_(in, weights, position, arithmetic, memory),
        token_(in, weights, plan, position, memory + Deviations::scratch_size(plan.models)) {
    memory += Deviations::scratch_size(plan.models) + TokenModels::scratch_size(plan.models);
    for (double** column : {&columns_.base, &columns_.total, &mean_, &exact_}) {
      *column = memory;
      memory += tile_;
    }
    rare_ = reinterpret_cast<std::int64_t*>(memory);
    memory += 2 * kMostRare;
    float* floats = reinterpret_cast<float*>(memory);
    for (float** column : {&columns_.grid, &columns_.rest, &columns_.z0, &columns_.partial, &q_,
                           &p_, &middle_, &factor_, &spread_}) {
      *column = floats;
      floats += tile_;
    }
    columns_.deviations = floats;
    columns_.width = tile_;
    for (std::int64_t i = 0; i < plan.models; ++i) {
      mean_weight_ += weights.weight[i * in.shape.positions + position] / plan.slots;
    }
    serves_ = rows_.serves();
  }

  // Returns false if floats cannot serve this position.
  template <Dtype D>
  bool load(std::int64_t begin, std::int64_t length) {
    rare_count_ = 0;
    const std::int64_t padded = round_up(length, Flt::kLanes);
    load_public<D>(begin, length, padded);
    absent_ = rare_count_;
    if (serves_) rows_.load<D>(begin, length, columns_);
    if (serves_) prepare(begin, padded);
    return serves_;
  }

  // x_i = (middle - deviation of i) factor reach at tokens with p > 0.
  const float* deviations(std::int64_t i) const { return columns_.deviations + i * tile_; }
  const float* middle() const { return middle_; }
  const float* factor() const { return factor_; }
  const float* p() const { return p_; }
  // The mean of delta over the slots, and whether it was computed in double.
  double mean(std::int64_t lane) const { return mean_[lane]; }
  bool exact() const { return arithmetic_.in_double; }
  // The mean |delta| over the slots relative to 1 + mean, rounded up. 0 if the mean is in double.
  double spread(std::int64_t lane) const {
    if (exact()) return 0.0;
    float& known = spread_[lane];
    if (known < 0.0f) {
      double total = 0.0;
      for (std::int64_t i = 0; i < plan_.models; ++i) total += std::fabs(deviations(i)[lane]);
      known = static_cast<float>(1.001 * total / (plan_.slots * (1.0 + mean_[lane])));
    }
    return known;
  }
  // The mean in double. mixture() gives the p that belongs to it.
  template <Dtype D>
  double exact_mean(std::int64_t begin, std::int64_t lane) const {
    if (exact()) return mean_[lane];
    if (std::isnan(exact_[lane])) exact_[lane] = token_.mean<D>(begin + lane);
    return exact_[lane];
  }
  double mixture(std::int64_t lane, double mean) const { return q_[lane] * (1.0 + mean); }
  const TokenModels& token() const { return token_; }
  // Tokens that the columns leave out (p = 0) although they count.
  std::int64_t rare_count() const { return rare_count_; }
  std::int64_t rare(std::int64_t k) const { return rare_[k]; }
  bool balances(std::int64_t k) const { return k >= absent_; }  // already in the balance
  const TokenSums& sums() const { return sums_; }               // over all tiles

 private:
  static constexpr std::int64_t kColumns = 9, kMostRare = 16;

  template <Dtype D>
  void load_public(std::int64_t begin, std::int64_t length, std::int64_t padded) {
    const Row row = row_of(in_.public_logits, 0, position_);
    const double public_lse = in_.public_lse[position_];
    const Vec lse(public_lse);
    for (std::int64_t lane = 0; lane < padded; lane += Flt::kLanes) {
      Flt z = load_floats<D>(row.data, begin + lane, begin + length);
      const Vec low = low_half(z) - lse, high = high_half(z) - lse;
      const Flt log_q = narrow(low, high);
      const auto absent = Flt(static_cast<float>(kFloatLogQ)) > log_q;  // false for NaN
      vselect(absent, Flt(0.0f), float_exp(low, high)).store(q_ + lane);
      // Absent tokens are read as q = 1, which no private row exceeds.
      z = vselect(absent, Flt(static_cast<float>(public_lse)), z);
      if (arithmetic_.in_double) {
        z.store(columns_.z0 + lane);
      } else {
        const FloatTokens a = float_tokens(low_half(z), high_half(z));
        a.grid.store(columns_.grid + lane), a.rest.store(columns_.rest + lane);
        Flt(-1.0f).store(spread_ + lane);
        Vec(NAN).store(exact_ + lane);
        Vec(NAN).store(exact_ + lane + Vec::kLanes);
      }
      for (unsigned bits = absent.bits(); bits != 0; bits &= bits - 1) {
        const std::int64_t v = begin + lane + __builtin_ctz(bits);
        if (v >= begin + length) break;
        if (row.at(v) > -HUGE_VAL) {
          add_rare_token(v);
        } else {
          serves_ = serves_ && !any_private<D>(v);
        }
      }
    }
  }

  // Returns whether some model would answer a token that the public row masks.
  template <Dtype D>
  bool any_private(std::int64_t v) const {
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const bool weighs = weights_.weight[i * in_.shape.positions + position_] > 0.0;
      // NaN counts, too.
      if (weighs && !(row_of(in_.private_logits, i, position_).at(v) == -HUGE_VAL)) return true;
    }
    return false;
  }

  void add_rare_token(std::int64_t v) {
    serves_ = serves_ && rare_count_ < kMostRare;
    if (serves_) rare_[rare_count_++] = v;
  }

  // Computes p, and middle and factor of t = (middle - e) factor.
  void prepare(std::int64_t begin, std::int64_t padded) {
    const Vec slots(plan_.slots), missing(plan_.absent / plan_.slots), one(1.0), zero(0.0);
    const Vec share(static_cast<double>(plan_.models) / plan_.slots);
    const Vec least(least_ratio(arithmetic_.in_double)), weights(2.0 * mean_weight_);
    const double divisor = plan_.against_public ? plan_.slots : plan_.slots - 1.0;
    Vec balance(0.0), common(0.0), between(0.0), growth(0.0);
    for (std::int64_t lane = 0; lane < padded; lane += Flt::kLanes) {
      const Flt q = Flt::load(q_ + lane);
      Vec middle[2], factor[2], p[2];
      unsigned lost = 0;
      for (int half = 0; half < 2; ++half) {
        const std::int64_t at = lane + half * Vec::kLanes;
        const Vec base = Vec::load(columns_.base + at);
        const Vec weight = half ? high_half(q) : low_half(q);
        const Vec others = Vec::load(columns_.total + at) / slots;
        const Vec mean = vfma(base, share, others), ratio = one + mean;
        mean.store(mean_ + at);
        middle[half] = plan_.against_public ? zero - base : others - base * missing;
        balance = vfma(weight, mean, balance);
        // If the mixture is far below q, 1 + mean cancels too much.
        const auto present = weight > zero, low = ratio < least;
        lost |= (low & present).bits() << (half * Vec::kLanes);
        const Vec inverse = vselect(low, zero, one / vmax(ratio, Vec(1e-30)));
        p[half] = vselect(low, zero, weight * ratio);
        growth = vmax(growth, vselect(present, (mean + weights) * inverse, zero));
        factor[half] = inverse * Vec(1.0 / (divisor * reach_));
        const Vec relative = inverse * Vec(1.0 / divisor), part = mean * relative;
        common = vfma(p[half] * part, part, common);
        const Vec distance = middle[half] * relative;
        between = vfma(p[half] * distance, distance, between);
      }
      narrow(middle[0], middle[1]).store(middle_ + lane);
      narrow(factor[0], factor[1]).store(factor_ + lane);
      narrow(p[0], p[1]).store(p_ + lane);
      for (; lost != 0; lost &= lost - 1) {
        add_rare_token(begin + lane + __builtin_ctz(lost));
      }
    }
    TokenSums sums{sum(balance), sum(common), sum(between), maximum(growth)};
    if (!arithmetic_.in_double) {
      sums.float_common = sums.common;
      sums.float_growth = sums.growth;
    }
    sums_.add(sums);
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan& plan_;
  Arithmetic arithmetic_;
  double reach_;
  std::int64_t position_, tile_;
  Deviations rows_;
  TokenModels token_;
  DeviationColumns columns_{};
  double *mean_, *exact_;
  std::int64_t* rare_;
  float *q_, *p_, *middle_, *factor_, *spread_;
  std::int64_t rare_count_ = 0, absent_ = 0;
  double mean_weight_ = 0.0;
  TokenSums sums_;
  bool serves_ = true;
};

ADAPMIXED_CORE_END
