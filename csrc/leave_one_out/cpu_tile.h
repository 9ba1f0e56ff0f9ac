// A stretch of one position's vocabulary: x = p'/p - 1 of all models at its tokens.
//
// delta_i = p_bar_i / q - 1 is computed in single precision, model by model, and from its mean what
// the models share. Half a vector is computed in double if that is not accurate enough for one of
// its tokens, and everything if there are few slots, or a box.
#pragma once

#include "common/float_rows.h"
#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

// What all positions of one call share.
struct LossPlan : Neighbours {
  const double* orders;
  std::int64_t num_orders, vocab;
  std::int64_t chunk;  // tokens of the unit of work; the chunks' sums are added in order
  std::int64_t tile;   // tokens such that their deviations stay in the second-level cache

  LossPlan(const Shape& shape, bool box, const LeaveOneOutOptions& options)
      : Neighbours(shape, box, options),
        orders(options.orders),
        num_orders(options.num_orders),
        vocab(shape.vocab) {
    const std::int64_t share = round_up((vocab + 31) / 32, 64);
    chunk = share < 512 ? 512 : share;
    const std::int64_t most = round_up(98304 / (models < 1 ? 1 : models), 64);
    const std::int64_t limit = most < 128 ? 128 : most > 1024 ? 1024 : most;
    const std::int64_t parts = (chunk + limit - 1) / limit;
    tile = round_up((chunk + parts - 1) / parts, 64);
  }

  // Of model i, with those of one model after those of the one before.
  ModelSums sums_of(double* sums, std::int64_t i, int degree) const {
    return {sums + i * ModelSums::columns(degree, num_orders), 1, num_orders};
  }
};

inline void add_to(TokenSums& to, const TokenSums& other) {
  to.balance += other.balance;
  to.common += other.common;
  to.most_common = std::fmax(to.most_common, other.most_common);
  to.growth = std::fmax(to.growth, other.growth);
}

class Tile {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) {  // in doubles
    return 2 * plan.tile + plan.models * (kConstants + 2 * Vec::kLanes) +
           (plan.models + kColumns) * plan.tile / 2;
  }

  Tile(const Ensemble& in, const Weights& weights, const LossPlan& plan, double reach,
       double mean_weight, std::int64_t position, double* memory)
      : in_(in),
        weights_(weights),
        plan_(plan),
        reach_(reach),
        mean_weight_(mean_weight),
        position_(position),
        width_(plan.tile),
        public_lse_(in.public_lse[position]),
        public_(row_of(in.public_logits, 0, position).data) {
    for (double** column : {&total_, &mixture_}) *column = memory, memory += width_;
    constants_ = reinterpret_cast<Constants*>(memory), memory += plan.models * kConstants;
    answers_ = memory, memory += plan.models * 2 * Vec::kLanes;
    float* floats = reinterpret_cast<float*>(memory);
    for (float** column : {&grid_, &rest_, &q_, &partial_, &largest_, &p_, &middle_, &factor_}) {
      *column = floats, floats += width_;
    }
    deviations_ = floats;
    for (std::int64_t i = 0; i < plan.models; ++i) {
      const std::int64_t at = i * in.shape.positions + position;
      const double lse = in.private_lse[at], centre = centre_of(lse), weight = weights.weight[at];
      const FloatShift shift = make_shift(lse - centre, public_lse_ - centre_of(public_lse_));
      constants_[i] = {shift.c, shift.lowest, static_cast<float>(centre),
                       static_cast<float>(weight * (1.0 + shift.residual)),
                       static_cast<float>(weight * shift.residual)};
    }
  }

  template <Dtype D>
  void load(std::int64_t begin, std::int64_t end) {
    begin_ = begin, end_ = end;
    load_public<D>();
    if (!plan_.in_double) load_models<D>();
    for (std::int64_t lane = 0; lane < padded(); lane += Flt::kLanes) {
      HalfVector half[2];
      for (int k = 0; k < 2; ++k) {
        if (plan_.in_double || !load_in_floats(lane, k, half[k])) {
          half[k] = load_in_double<D>(lane, k);
        }
        half[k].p.store(mixture_ + lane + k * Vec::kLanes);
      }
      narrow(half[0].p, half[1].p).store(p_ + lane);
      narrow(half[0].middle, half[1].middle).store(middle_ + lane);
      narrow(half[0].factor, half[1].factor).store(factor_ + lane);
    }
  }

  // middle + factor (deviation of i) is x as it is kept, divided by the reach.
  const float* deviations(std::int64_t i) const { return deviations_ + i * width_; }
  const float* middle() const { return middle_; }
  const float* factor() const { return factor_; }
  const float* p() const { return p_; }
  std::int64_t padded() const { return round_up(end_ - begin_, Flt::kLanes); }
  double mixture(std::int64_t lane) const { return mixture_[lane]; }  // p in double
  const TokenSums& sums() const { return sums_; }                     // over all tiles

 private:
  static constexpr std::int64_t kColumns = 8;
  static constexpr int kGroup = 4;  // models whose rows are read side by side

  // Of a model: delta = slope (r' - 1) + offset (common/float_ratio.h), and its row's centre.
  struct Constants {
    float c, lowest, centre, slope, offset;
  };
  static constexpr std::int64_t kConstants = sizeof(Constants) / 8 + 1;

  static Vec half_of(Flt a, int half) { return half ? high_half(a) : low_half(a); }
  const char* row(std::int64_t model) const {
    return row_of(in_.private_logits, model, position_).data;
  }

  template <Dtype D>
  void load_public() {
    const double centre = centre_of(public_lse_), lse = public_lse_ - centre;
    const Vec shift(lse), rarest(kRarest);
    const Flt at_one(static_cast<float>(lse)), masked(static_cast<float>(lse + kMaskedLog));
    for (std::int64_t lane = 0; lane < padded(); lane += Flt::kLanes) {
      const Flt z = load_floats<D>(public_, begin_ + lane, end_) - Flt(static_cast<float>(centre));
      const FltMask absent = masked > z;  // false for NaN
      const Flt q =
          float_exp(vmax(rarest, low_half(z) - shift), vmax(rarest, high_half(z) - shift));
      vselect(absent, Flt(0.0f), q).store(q_ + lane);
      // Absent tokens are read as q = 1, which no private row exceeds.
      const Flt read = vselect(absent, at_one, z);
      const FloatTokens a = float_tokens(low_half(read), high_half(read));
      a.grid.store(grid_ + lane), a.rest.store(rest_ + lane);
      for (unsigned bits = absent.bits(); bits != 0; bits &= bits - 1) {
        const std::int64_t v = begin_ + lane + __builtin_ctz(bits);
        if (v < end_ && !masked_by_all(in_, weights_, position_, v)) sums_.growth = HUGE_VAL;
      }
    }
  }

  template <Dtype D>
  void load_models() {
    for (std::int64_t lane = 0; lane < padded(); lane += Flt::kLanes) {
      Vec(0.0).store(total_ + lane), Vec(0.0).store(total_ + lane + Vec::kLanes);
      Flt(0.0f).store(partial_ + lane), Flt(-1.0f).store(largest_ + lane);
    }
    std::int64_t i = 0;
    for (; i + kGroup <= plan_.models; i += kGroup) {
      load_group<D, kGroup>(i);
      // At most 8 models are added in floats.
      if (i / kGroup % 2 == 1 || i + 2 * kGroup > plan_.models) widen_partial();
    }
    for (; i < plan_.models; ++i) {
      load_group<D, 1>(i);
      widen_partial();
    }
  }

  void widen_partial() {
    for (std::int64_t lane = 0; lane < padded(); lane += Flt::kLanes) {
      const Flt partial = Flt::load(partial_ + lane);
      double *low = total_ + lane, *high = low + Vec::kLanes;
      (Vec::load(low) + low_half(partial)).store(low);
      (Vec::load(high) + high_half(partial)).store(high);
      Flt(0.0f).store(partial_ + lane);
    }
  }

  template <Dtype D, int kCount>
  void load_group(std::int64_t first) {
    const char *rows[kCount], *next[kCount];
    Flt c[kCount], lowest[kCount], centre[kCount], slope[kCount], offset[kCount];
    for (int g = 0; g < kCount; ++g) {
      const std::int64_t later = first + g + kCount;
      rows[g] = row(first + g), next[g] = row(later < plan_.models ? later : first + g);
      const Constants& of = constants_[first + g];
      c[g] = Flt(of.c), lowest[g] = Flt(of.lowest), centre[g] = Flt(of.centre);
      slope[g] = Flt(of.slope), offset[g] = Flt(of.offset);
    }
    const auto step = [&](std::int64_t lane, const auto& logits) ADAPMIXED_INLINE {
      const Flt grid = Flt::load(grid_ + lane), rest = Flt::load(rest_ + lane);
      Flt e[kCount];
      ADAPMIXED_UNROLL
      for (int g = 0; g < kCount; ++g) {
        const Flt z = vmax(lowest[g], logits(g) - centre[g]);
        e[g] = vfma(ratio_excess(z, grid + c[g], rest), slope[g], offset[g]);
        e[g].store(deviations_ + (first + g) * width_ + lane);
      }
      Flt sum = e[0], most = e[0];
      if constexpr (kCount == 4) {
        sum = (e[0] + e[1]) + (e[2] + e[3]);
        most = vmax(vmax(e[0], e[1]), vmax(e[2], e[3]));
      }
      (Flt::load(partial_ + lane) + sum).store(partial_ + lane);
      vmax(Flt::load(largest_ + lane), most).store(largest_ + lane);
    };
    const std::int64_t length = end_ - begin_;
    std::int64_t lane = 0;
    for (; lane + Flt::kLanes <= length; lane += Flt::kLanes) {
      ADAPMIXED_UNROLL
      for (int g = 0; g < kCount; ++g) {
        __builtin_prefetch(next[g] + (begin_ + lane) * kElementSize<D>);
      }
      step(lane, [&](int g) ADAPMIXED_INLINE { return load_whole<D>(rows[g], begin_ + lane); });
    }
    if (lane < length) {
      step(lane, [&](int g) { return load_floats<D>(rows[g], begin_ + lane, end_); });
    }
  }

  // Of half a vector. Deviations of what is computed in double are x as it is kept.
  struct HalfVector {
    Vec p, middle{0.0}, factor{1.0};
  };

  // From the sums over the models. Returns false if single precision does not serve all tokens.
  bool load_in_floats(std::int64_t lane, int half, HalfVector& to) {
    const Vec zero(0.0), mass = half_of(Flt::load(q_ + lane), half);
    const FloatMixture<Vec> of =
        float_mixture(plan_, mass, Vec::load(total_ + lane + half * Vec::kLanes),
                      half_of(Flt::load(largest_ + lane), half), mean_weight_);
    const auto present = mass > zero;
    if ((present & of.fails).any()) return false;
    add_to(sums_, {sum(mass * of.mean), sum(of.p * of.shared * of.shared),
                   maximum(vselect(present, of.shared, zero)),
                   maximum(vselect(present, of.growth, zero))});
    const Vec factor = of.factor * Vec(-1.0 / reach_);
    to = {of.p, Vec(0.0) - of.middle * factor, factor};
    return true;
  }

  template <Dtype D>
  HalfVector load_in_double(std::int64_t lane, int half) {
    const MixtureToken<Vec> token = load_answers<D>(lane, half);
    const auto answer = [&](std::int64_t j) {
      const double* at = answers_ + 2 * j * Vec::kLanes;
      return Projected<Vec>{Vec::load(at), Vec::load(at + Vec::kLanes)};
    };
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      float* to = deviations_ + i * width_ + lane;
      const Vec x = kept_neighbour(plan_, token, i, answer) * Vec(1.0 / reach_);
      const Flt others = Flt::load(to);
      narrow(half ? low_half(others) : x, half ? x : high_half(others)).store(to);
    }
    return {token.p};
  }

  // Half a vector of tokens: keeps p_bar / q of all models.
  template <Dtype D>
  MixtureToken<Vec> load_answers(std::int64_t lane, int half) {
    const std::int64_t v = begin_ + lane + half * Vec::kLanes;
    const Vec zero(0.0), lse(public_lse_), logits = load_logits<D>(public_, v, end_);
    const auto present = half_of(Flt::load(q_ + lane), half) > zero;
    const Vec z0 = vselect(present, logits, lse), log_q = z0 - lse;
    const Vec q = vselect(present, exp_(vmax(Vec(kRarest), log_q)), zero);
    Mask answered = zero > zero, unbounded;
    const auto answer = [&](std::int64_t i) {
      const Vec z = load_logits<D>(row(i), v, end_);
      const Projected<Vec> own = answer_of(in_, weights_, i, position_, z, z0, answered);
      double* to = answers_ + 2 * i * Vec::kLanes;
      own.excess.store(to), own.ratio.store(to + Vec::kLanes);
      return own;
    };
    const MixtureToken<Vec> token = load_token(plan_, q, log_q, answer, answered, unbounded);
    if (unbounded.any()) sums_.growth = HUGE_VAL;
    sums_.balance += sum(q * token.mean.excess);
    return token;
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan& plan_;
  double reach_, mean_weight_;
  std::int64_t position_, width_, begin_ = 0, end_ = 0;
  double public_lse_;
  const char* public_;
  TokenSums sums_;
  Constants* constants_;
  double *total_, *mixture_;  // the sum of delta over the models, and p
  double* answers_;           // (N, 2, Vec::kLanes): p_bar / q - 1 and p_bar / q of half a vector
  // The public row as common/float_ratio.h reads it, a part of total_ and the largest delta, and
  // what is returned.
  float *grid_, *rest_, *q_, *partial_, *largest_, *p_, *middle_, *factor_, *deviations_;
};

ADAPMIXED_CORE_END
