// A tile of the vocabulary of one position in single precision: how all models' delta = p_bar/q - 1
// differ from the first one's, and what the models share, per token.
#pragma once

#include <initializer_list>

#include "cpu/float_public.h"
#include "cpu/loss_plan.h"

ADAPMIXED_CORE_BEGIN

class DeviationTile {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) {  // doubles
    const std::int64_t tile = plan.tile();
    return 2 * tile + plan.models * kConstants + 2 * kMostRare +
           (plan.models + kColumns) * tile / 2;
  }

  DeviationTile(const Ensemble& in, const Weights& weights, const LossPlan& plan, double reach,
                std::int64_t position, double* memory)
      : in_(in),
        weights_(weights),
        plan_(plan),
        reach_(reach),
        position_(position),
        tile_(plan.tile()) {
    spread_ = memory;
    mean_ = spread_ + tile_;
    memory += 2 * tile_;
    constants_ = reinterpret_cast<Constants*>(memory);
    memory += plan.models * kConstants;
    rare_ = reinterpret_cast<std::int64_t*>(memory);
    memory += 2 * kMostRare;
    float* floats = reinterpret_cast<float*>(memory);
    for (float** column : {&base_, &z0_, &q_, &p_, &middle_, &factor_, &partial_}) {
      *column = floats;
      floats += tile_;
    }
    deviations_ = floats;
    const double public_lse = in.public_lse[position];
    for (std::int64_t i = 0; i < plan.models; ++i) {
      const std::int64_t at = i * in.shape.positions + position;
      const double weight = weights.weight[at];
      Constants& c = constants_[i];
      c.shift = make_shift(in.private_lse[at] - public_lse);
      c.slope = static_cast<float>(weight * (1.0 + c.shift.residual));
      c.offset = static_cast<float>(weight * c.shift.residual);
    }
  }

  // False where floats do not do.
  template <Dtype D>
  bool load(std::int64_t begin, std::int64_t length) {
    rare_count_ = 0;
    const std::int64_t padded = round_up(length, Flt::kLanes);
    load_public<D>(begin, length, padded);
    absent_ = rare_count_;
    if (serves_) load_models<D>(begin, length);
    if (serves_) prepare(begin, padded);
    return serves_;
  }

  // x_i = (middle - deviation of i) factor reach where the mixture p is not 0.
  const float* deviations(std::int64_t i) const { return deviations_ + i * tile_; }
  const float* middle() const { return middle_; }
  const float* factor() const { return factor_; }
  const float* p() const { return p_; }
  double mean(std::int64_t lane) const { return mean_[lane]; }  // of delta over the slots
  // Tokens that are absent there (p = 0) and are not nothing.
  std::int64_t rare_count() const { return rare_count_; }
  std::int64_t rare(std::int64_t k) const { return rare_[k]; }
  bool balances(std::int64_t k) const { return k >= absent_; }  // in mean_balance already
  // Over all tiles: sum_v q mean_i delta_i, sum_v p (mean delta_i / (slots (1 + mean delta_i)))^2.
  double mean_balance() const { return mean_balance_; }
  double common() const { return common_; }

 private:
  static constexpr std::int64_t kColumns = 7, kMostRare = 16;
  static constexpr int kGroup = 4;     // models whose rows are read side by side
  static constexpr int kPartial = 16;  // models summed in floats before the sum is widened

  struct Constants {
    FloatShift shift;
    float slope, offset;  // delta = slope (r' - 1) + offset
  };
  static constexpr std::int64_t kConstants = sizeof(Constants) / 8 + 1;

  template <Dtype D>
  void load_public(std::int64_t begin, std::int64_t length, std::int64_t padded) {
    const Row row = row_of(in_.public_logits, 0, position_);
    const Vec lse(in_.public_lse[position_]);
    for (std::int64_t lane = 0; lane < padded; lane += Flt::kLanes) {
      const Flt z = load_floats<D>(row.data, begin + lane, begin + length);
      const Vec low = low_half(z) - lse, high = high_half(z) - lse;
      const Flt log_q = narrow(low, high);
      const auto absent = Flt(static_cast<float>(kFloatLogQ)) > log_q;  // not NaN
      vselect(absent, Flt(0.0f), float_exp(low, high)).store(q_ + lane);
      // Absent tokens read as r = e^-80, whatever the private row has there.
      vselect(absent, Flt(3e38f), z).store(z0_ + lane);
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

  // Whether some model would answer a token that the public row masks.
  template <Dtype D>
  bool any_private(std::int64_t v) const {
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const bool weighs = weights_.weight[i * in_.shape.positions + position_] > 0.0;
      // Also where it is NaN.
      if (weighs && !(row_of(in_.private_logits, i, position_).at(v) == -HUGE_VAL)) return true;
    }
    return false;
  }

  void add_rare_token(std::int64_t v) {
    serves_ = serves_ && rare_count_ < kMostRare;
    if (serves_) rare_[rare_count_++] = v;
  }

  template <Dtype D>
  void load_models(std::int64_t begin, std::int64_t length) {
    for (std::int64_t lane = 0; lane < tile_; lane += Flt::kLanes) {
      Flt(0.0f).store(partial_ + lane);
      Flt(0.0f).store(deviations_ + lane);
      Flt(0.0f).store(base_ + lane);
      Vec(0.0).store(spread_ + lane);
      Vec(0.0).store(spread_ + lane + Vec::kLanes);
    }
    load_group<D, 1>(0, begin, length);
    std::int64_t i = 1, unflushed = 0;
    for (; i + kGroup <= plan_.models; i += kGroup) {
      load_group<D, kGroup>(i, begin, length);
      unflushed += kGroup;
      if (unflushed >= kPartial) flush_spread(), unflushed = 0;
    }
    for (; i < plan_.models; ++i) load_group<D, 1>(i, begin, length);
    flush_spread();
  }

  template <Dtype D, int kCount>
  void load_group(std::int64_t first, std::int64_t begin, std::int64_t length) {
    const char *rows[kCount], *next[kCount];
    Flt slope[kCount], offset[kCount];
    FloatShift shift[kCount];
    for (int g = 0; g < kCount; ++g) {
      const std::int64_t later = first + g + kCount;
      rows[g] = row_of(in_.private_logits, first + g, position_).data;
      next[g] =
          row_of(in_.private_logits, later < plan_.models ? later : first + g, position_).data;
      shift[g] = constants_[first + g].shift;
      slope[g] = Flt(constants_[first + g].slope);
      offset[g] = Flt(constants_[first + g].offset);
    }
    float* out = deviations_ + first * tile_;
    const auto step = [&](std::int64_t lane, const auto& logits) ADAPMIXED_INLINE {
      const Flt z0 = Flt::load(z0_ + lane), base = Flt::load(base_ + lane);
      Flt e[kCount];
      ADAPMIXED_UNROLL
      for (int g = 0; g < kCount; ++g) {
        __builtin_prefetch(next[g] + (begin + lane) * kElementSize<D>);
        e[g] = vfma(ratio_excess(logits(g) - z0, shift[g]), slope[g], offset[g]) - base;
      }
      if (kCount == 1 && first == 0) {
        e[0].store(base_ + lane);  // e_0 = 0 has been stored
        return;
      }
      ADAPMIXED_UNROLL
      for (int g = 0; g < kCount; ++g) e[g].store(out + g * tile_ + lane);
      Flt total = e[0];
      if constexpr (kCount == 4) total = (e[0] + e[1]) + (e[2] + e[3]);
      (Flt::load(partial_ + lane) + total).store(partial_ + lane);
    };
    std::int64_t lane = 0;
    for (; lane + Flt::kLanes <= length; lane += Flt::kLanes) {
      step(lane, [&](int g) ADAPMIXED_INLINE { return load_whole<D>(rows[g], begin + lane); });
    }
    if (lane < length) {
      step(lane, [&](int g) { return load_floats<D>(rows[g], begin + lane, begin + length); });
    }
  }

  void flush_spread() {
    for (std::int64_t lane = 0; lane < tile_; lane += Flt::kLanes) {
      const Flt partial = Flt::load(partial_ + lane);
      double* low = spread_ + lane;
      double* high = low + Vec::kLanes;
      (Vec::load(low) + low_half(partial)).store(low);
      (Vec::load(high) + high_half(partial)).store(high);
      Flt(0.0f).store(partial_ + lane);
    }
  }

  // p, and t = (middle - e) factor.
  void prepare(std::int64_t begin, std::int64_t padded) {
    const Vec share(static_cast<double>(plan_.models) / plan_.slots);
    const Vec missing(plan_.absent / plan_.slots), each(1.0 / plan_.slots), one(1.0), zero(0.0);
    const double divisor = plan_.against_public ? plan_.slots : plan_.slots - 1.0;
    Vec balance(0.0), common(0.0);
    for (std::int64_t lane = 0; lane < padded; lane += Flt::kLanes) {
      const Flt base = Flt::load(base_ + lane), q = Flt::load(q_ + lane);
      Vec middle[2], factor[2], p[2];
      unsigned lost = 0;
      for (int half = 0; half < 2; ++half) {
        const Vec first = half ? high_half(base) : low_half(base);
        const Vec weight = half ? high_half(q) : low_half(q);
        const Vec others = Vec::load(spread_ + lane + half * Vec::kLanes) * each;
        const Vec mean = vfma(first, share, others), ratio = one + mean;
        mean.store(mean_ + lane + half * Vec::kLanes);
        middle[half] = plan_.against_public ? zero - first : others - first * missing;
        balance = vfma(weight, mean, balance);
        // A mixture far below q: what cancels in 1 + mean is too much.
        const auto low = (ratio < Vec(0.25)) & (weight > zero);
        lost |= low.bits() << (half * Vec::kLanes);
        const Vec inverse = vselect(low, zero, one / vmax(ratio, Vec(1e-30)));
        p[half] = vselect(low, zero, weight * ratio);
        factor[half] = inverse * Vec(1.0 / (divisor * reach_));
        const Vec part = mean * inverse * Vec(1.0 / divisor);
        common = vfma(p[half] * part, part, common);
      }
      narrow(middle[0], middle[1]).store(middle_ + lane);
      narrow(factor[0], factor[1]).store(factor_ + lane);
      narrow(p[0], p[1]).store(p_ + lane);
      for (; lost != 0; lost &= lost - 1) {
        add_rare_token(begin + lane + __builtin_ctz(lost));
      }
    }
    mean_balance_ += sum(balance);
    common_ += sum(common);
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan& plan_;
  double reach_;
  std::int64_t position_, tile_;
  double *spread_, *mean_;
  Constants* constants_;
  std::int64_t* rare_;
  float *base_, *z0_, *q_, *p_, *middle_, *factor_, *partial_, *deviations_;
  std::int64_t rare_count_ = 0, absent_ = 0;
  double mean_balance_ = 0.0, common_ = 0.0;
  bool serves_ = true;
};

ADAPMIXED_CORE_END
