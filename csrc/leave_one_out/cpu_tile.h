// A stretch of one position's vocabulary: x = p'/p - 1 of all models at its tokens.
//
// delta_i = p_bar_i / q - 1 is computed in single precision, model by model, and from its mean what
// the models share. Vectors with a token for which that is not accurate enough are computed in
// double: of a mixture far below q, of which one model makes up nearly all, or of a tiny q. So is
// everything if there are few slots, or a box.
#pragma once

#include "common/float_rows.h"
#include "leave_one_out/bound.h"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN

// The moments of one position: the index and the degree of their interpolants, and these' reach.
struct MomentChoice {
  int index, degree;
  double reach;
};

// What all positions of one call share.
struct LossPlan : Neighbours {
  const LeaveOneOutOptions& options;
  std::int64_t models, vocab;

  LossPlan(const Shape& shape, const LeaveOneOutOptions& o)
      : Neighbours(neighbours_of(shape, o)), options(o), models(shape.models), vocab(shape.vocab) {}

  MomentChoice moments(double largest_weight) const {
    const int index = loss_degree(*this, largest_weight), degree = degree_at(index);
    return {index, degree, moment_reach(largest_order, degree)};
  }

  // The number of tokens in a chunk, which is the unit of work; the chunks' sums are added in
  // order.
  std::int64_t chunk() const {
    const std::int64_t share = round_up((vocab + 31) / 32, 64);
    return share < 512 ? 512 : share;
  }
  // The number of tokens in a tile, such that its deviations stay in the second-level cache.
  std::int64_t tile() const {
    const std::int64_t most = round_up(98304 / (models < 1 ? 1 : models), 64);
    const std::int64_t limit = most < 128 ? 128 : most > 1024 ? 1024 : most;
    const std::int64_t parts = (chunk() + limit - 1) / limit;
    return round_up((chunk() + parts - 1) / parts, 64);
  }
};

class Tile {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) {  // in doubles
    return 2 * plan.tile() + plan.models * (kConstants + 4 * Vec::kLanes) +
           (plan.models + kColumns) * plan.tile() / 2;
  }

  Tile(const Ensemble& in, const Weights& weights, const LossPlan& plan, double reach,
       std::int64_t position, double* memory)
      : in_(in),
        weights_(weights),
        plan_(plan),
        reach_(reach),
        position_(position),
        width_(plan.tile()),
        public_(row_of(in.public_logits, 0, position)),
        in_double_(weights.upper > 0.0 || few_slots(plan)) {
    for (double** column : {&total_, &mixture_}) *column = memory, memory += width_;
    constants_ = reinterpret_cast<Constants*>(memory), memory += plan.models * kConstants;
    answers_ = memory, memory += plan.models * 4 * Vec::kLanes;
    float* floats = reinterpret_cast<float*>(memory);
    for (float** column : {&grid_, &rest_, &q_, &partial_, &largest_, &p_, &middle_, &factor_}) {
      *column = floats, floats += width_;
    }
    deviations_ = floats;
    const double lse = in.public_lse[position], centre = centre_of(lse);
    for (std::int64_t i = 0; i < plan.models; ++i) {
      const std::int64_t at = i * in.shape.positions + position;
      const double own = in.private_lse[at], weight = weights.weight[at];
      mean_weight_ += weight / plan.slots;
      const FloatShift shift = make_shift(own - centre_of(own), lse - centre);
      constants_[i] = {shift.c, shift.lowest, static_cast<float>(centre_of(own)),
                       static_cast<float>(weight * (1.0 + shift.residual)),
                       static_cast<float>(weight * shift.residual)};
    }
  }

  // Returns false if no loss of the position can be bounded.
  template <Dtype D>
  bool load(std::int64_t begin, std::int64_t length) {
    begin_ = begin, length_ = length;
    load_public<D>();
    if (!in_double_) load_models<D>();
    for (std::int64_t lane = 0; lane < length; lane += Flt::kLanes) {
      if (in_double_ || !prepare(lane)) load_in_double<D>(lane);
    }
    return bounded_;
  }

  // (middle - deviation of i) factor is what `kept` returns, divided by the reach.
  const float* deviations(std::int64_t i) const { return deviations_ + i * width_; }
  const float* middle() const { return middle_; }
  const float* factor() const { return factor_; }
  const float* p() const { return p_; }
  bool in_double(std::int64_t lane) const { return factor_[lane] < 0.0f; }
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

  std::int64_t padded() const { return round_up(length_, Flt::kLanes); }
  const char* row(std::int64_t model) const {
    return row_of(in_.private_logits, model, position_).data;
  }

  template <Dtype D>
  void load_public() {
    const double lse = in_.public_lse[position_], centre = centre_of(lse);
    const Vec shift(lse - centre), rarest(kRarest);
    const Flt at_one(static_cast<float>(lse - centre));
    const Flt masked(static_cast<float>(lse - centre + kMaskedLog));
    for (std::int64_t lane = 0; lane < padded(); lane += Flt::kLanes) {
      const Flt z = load_floats<D>(public_.data, begin_ + lane, begin_ + length_) -
                    Flt(static_cast<float>(centre));
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
        if (v < begin_ + length_ && weights_.upper == 0.0) check_masked(v);
      }
    }
  }

  // A token that the public row masks may have no part of any model's answer.
  void check_masked(std::int64_t v) {
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const std::int64_t at = i * in_.shape.positions + position_;
      const double log_p = row_of(in_.private_logits, i, position_).at(v) - in_.private_lse[at];
      if (weights_.weight[at] > 0.0 && !(log_p <= kMaskedLog)) bounded_ = false;
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
    std::int64_t lane = 0;
    for (; lane + Flt::kLanes <= length_; lane += Flt::kLanes) {
      ADAPMIXED_UNROLL
      for (int g = 0; g < kCount; ++g) {
        __builtin_prefetch(next[g] + (begin_ + lane) * kElementSize<D>);
      }
      step(lane, [&](int g) ADAPMIXED_INLINE { return load_whole<D>(rows[g], begin_ + lane); });
    }
    if (lane < length_) {
      step(lane, [&](int g) { return load_floats<D>(rows[g], begin_ + lane, begin_ + length_); });
    }
  }

  // Computes p, middle and factor of a vector from the sums over the models. Returns false if
  // single precision does not serve all its tokens.
  bool prepare(std::int64_t lane) {
    const Vec one(1.0), zero(0.0), slots(plan_.slots), weights(2.0 * mean_weight_);
    const Vec per_divisor(1.0 / (plan_.against_public ? plan_.slots : plan_.slots - 1.0));
    const Flt q = Flt::load(q_ + lane), largest = Flt::load(largest_ + lane);
    Vec middle[2], factor[2], p[2], balance(0.0), common(0.0), most_common(0.0), growth(0.0);
    bool serves = true;
    for (int half = 0; half < 2; ++half) {
      const Vec weight = half ? high_half(q) : low_half(q);
      const Vec mean = Vec::load(total_ + lane + half * Vec::kLanes) / slots, ratio = one + mean;
      const auto present = weight > zero;
      const Vec inverse = one / vmax(ratio, Vec(1e-30)), relative = inverse * per_divisor;
      middle[half] = plan_.against_public ? zero : mean;
      const Vec least = (middle[half] - (half ? high_half(largest) : low_half(largest))) * relative;
      const auto failed =
          (ratio < Vec(kLeastRatio)) | (least < Vec(-0.45)) | (weight < Vec(kLeastFloatQ));
      serves = serves && !(present & failed).any();
      p[half] = vselect(present, weight * ratio, zero);
      factor[half] = relative * Vec(1.0 / reach_);
      balance = vfma(weight, mean, balance);
      const Vec shared = vabs(middle[half]) * relative;
      common = vfma(p[half] * shared, shared, common);
      most_common = vmax(most_common, vselect(present, shared, zero));
      growth = vmax(growth, vselect(present, (mean + weights) * inverse, zero));
    }
    if (!serves) return false;
    narrow(middle[0], middle[1]).store(middle_ + lane);
    narrow(factor[0], factor[1]).store(factor_ + lane);
    narrow(p[0], p[1]).store(p_ + lane);
    p[0].store(mixture_ + lane), p[1].store(mixture_ + lane + Vec::kLanes);
    sums_.add({sum(balance), sum(common), maximum(most_common), maximum(growth)});
    return true;
  }

  // The same in double: what `kept` returns instead of deviations.
  template <Dtype D>
  void load_in_double(std::int64_t lane) {
    const MixtureToken<Vec> token[2] = {load_answers<D>(lane, 0), load_answers<D>(lane, 1)};
    token[0].p.store(mixture_ + lane), token[1].p.store(mixture_ + lane + Vec::kLanes);
    narrow(token[0].p, token[1].p).store(p_ + lane);
    Flt(0.0f).store(middle_ + lane), Flt(-1.0f).store(factor_ + lane);
    const Vec scale(1.0 / reach_);
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const Vec low = neighbour(i, 0, token[0]), high = neighbour(i, 1, token[1]);
      narrow(low * scale, high * scale).store(deviations_ + i * width_ + lane);
    }
  }

  Projected<Vec> answer(std::int64_t model, int half) const {
    const double* at = answers_ + (2 * model + half) * 2 * Vec::kLanes;
    return {Vec::load(at), Vec::load(at + Vec::kLanes)};
  }

  // Half a vector of tokens: keeps p_bar / q of all models.
  template <Dtype D>
  MixtureToken<Vec> load_answers(std::int64_t lane, int half) {
    const std::int64_t v = begin_ + lane + half * Vec::kLanes, end = begin_ + length_;
    const Vec zero(0.0), z0 = load_logits<D>(public_.data, v, end);
    const Vec log_q = z0 - Vec(in_.public_lse[position_]);
    const Flt of_public = Flt::load(q_ + lane);
    const auto absent = zero >= (half ? high_half(of_public) : low_half(of_public));
    const Vec q = vselect(absent, zero, exp_(vmax(Vec(kRarest), log_q)));
    Projected<Vec> total{zero, Vec(plan_.absent)};
    auto answered = absent;
    const bool box = weights_.upper > 0.0;
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const std::int64_t at = i * in_.shape.positions + position_;
      const Vec shift(in_.private_lse[at] - in_.public_lse[position_]);
      const Vec z = load_logits<D>(row(i), v, end), log_ratio = z - z0 - shift;
      answered = answered | (log_ratio > Vec(kMaskedLog));
      const auto clipped_away = z < Vec(box ? least_clipped(in_.private_lse[at]) : -HUGE_VAL);
      const Vec least = vselect(clipped_away, Vec(-HUGE_VAL), log_ratio);
      const Vec t = vselect(absent, zero, vmin(Vec(kMostLogRatio), least));
      const Projected<Vec> own = Member<Vec>(weights_, at)(t);
      double* to = answers_ + (2 * i + half) * 2 * Vec::kLanes;
      own.excess.store(to), own.ratio.store(to + Vec::kLanes);
      total = {total.excess + own.excess, total.ratio + own.ratio};
    }
    const Projected<Vec> mean{total.excess / Vec(plan_.slots), total.ratio / Vec(plan_.slots)};
    auto lost = absent;
    const MixtureToken<Vec> token = mixture_token(plan_, q, mean, lost);
    bounded_ = bounded_ && !unbounded(plan_, token, lost, answered, q, log_q).any();
    sums_.balance += sum(q * mean.excess);
    return token;
  }

  Vec neighbour(std::int64_t i, int half, const MixtureToken<Vec>& token) const {
    auto dominated = token.p > Vec(0.0);
    const auto counted = dominated;
    const NeighbourToken<Vec> other = neighbour_token(plan_, token, answer(i, half), dominated);
    const unsigned recomputed = dominated.bits() & counted.bits();
    if (recomputed == 0) return vselect(counted, kept(other.x, other.X), Vec(0.0));
    double lanes[Vec::kLanes], totals[Vec::kLanes];
    kept(other.x, other.X).store(lanes), token.total.store(totals);
    for (unsigned bits = recomputed; bits != 0; bits &= bits - 1) {
      const int lane = __builtin_ctz(bits);
      double rest = plan_.absent;
      for (std::int64_t j = 0; j < plan_.models; ++j) {
        if (j != i) rest += answers_[((2 * j + half) * 2 + 1) * Vec::kLanes + lane];
      }
      const double X = ratio_from_rest(plan_, rest, totals[lane]);
      lanes[lane] = kept(X - 1.0, X);
    }
    return vselect(counted, Vec::load(lanes), Vec(0.0));
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan& plan_;
  double reach_;
  std::int64_t position_, width_, begin_ = 0, length_ = 0;
  Row public_;
  bool in_double_, bounded_ = true;
  double mean_weight_ = 0.0;
  TokenSums sums_;
  Constants* constants_;
  double *total_, *mixture_;  // the sum of delta over the models, and p
  double* answers_;           // (N, 2, 2, Vec::kLanes): p_bar / q - 1 and p_bar / q of a vector
  // The public row as common/float_ratio.h reads it, a part of total_ and the largest delta, and
  // what is returned.
  float *grid_, *rest_, *q_, *partial_, *largest_, *p_, *middle_, *factor_, *deviations_;
};

ADAPMIXED_CORE_END
