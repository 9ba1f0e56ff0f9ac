// A stretch of one position's vocabulary in single precision: all models' leave-one-out sums at
// once.
//
// First the tile is filled with e_i = delta_i - delta_0 of all models, delta = p_bar/q - 1; then,
// model by model, x_i = p'/p - 1 is a difference of two of its numbers times a factor of the token.
// Most x are small: sums of p t^k, t = x / reach, serve all orders. Larger ones are listed and
// summed by themselves; tokens or pairs where floats do not do go to the log domain one by one.
#pragma once

#include <initializer_list>

#include "core/leave_one_out.h"
#include "cpu/float_public.h"
#include "cpu/loss_plan.h"

ADAPMIXED_CORE_BEGIN

class FloatChunk {
 public:
  static std::int64_t scratch_size(const LossPlan& plan, int degree) {  // doubles
    const std::int64_t tile = plan.tile(), models = plan.models;
    return (models * tile + kColumns * tile) / 2 + 64 + tile + 4 * (tile + 16) + models + 8 +
           models * (1 + degree) * Vec::kLanes +
           models * static_cast<std::int64_t>(sizeof(Constants) / 8 + 1) + 2 * kMostRare;
  }

  FloatChunk(const Ensemble& in, const Weights& weights, const LossPlan& plan, const LossFit& fit,
             std::int64_t position, double* memory)
      : in_(in),
        weights_(weights),
        plan_(plan),
        fit_(fit),
        position_(position),
        tile_(plan.tile()) {
    accumulators_ = memory;
    memory += plan.models * (1 + fit.degree) * Vec::kLanes;
    spread_ = memory;
    memory += tile_;
    constants_ = reinterpret_cast<Constants*>(memory);
    memory += plan.models * static_cast<std::int64_t>(sizeof(Constants) / 8 + 1);
    rare_ = reinterpret_cast<std::int64_t*>(memory);
    memory += 2 * kMostRare;
    for (List* list : {&listed_, &recomputed_}) {
      list->x = memory;
      list->p = memory + tile_ + 16;
      memory += 2 * (tile_ + 16);
    }
    ratios_ = memory;
    memory += round_up(plan.models, 8);
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

  // Adds to the sums of all models, one after the other; false where floats do not do for this
  // stretch.
  bool add(std::int64_t begin, std::int64_t end, double* sums) {
    const std::int64_t size = plan_.models * (1 + fit_.degree) * Vec::kLanes;
    for (std::int64_t k = 0; k < size; ++k) accumulators_[k] = 0.0;
    with_dtype(in_.private_logits.dtype, [&](auto tag) {
      for (std::int64_t v = begin; v < end && serves_; v += tile_) {
        add_tile<decltype(tag)::value>(v, v + tile_ < end ? tile_ : end - v, sums);
      }
    });
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const double* own = accumulators_ + i * (1 + fit_.degree) * Vec::kLanes;
      const ModelSums to = model_sums(sums, i);
      to.first() += sum(Vec::load(own)) * fit_.reach;
      for (int k = 0; k < fit_.degree; ++k) {
        to.moments()[k] += sum(Vec::load(own + (1 + k) * Vec::kLanes));
      }
    }
    return serves_;
  }

  // sum_v q mean_i delta_i, and sum_v p (mean delta_i / (slots (1 + mean delta_i)))^2.
  double mean_balance() const { return mean_balance_; }
  double common() const { return common_; }

 private:
  static constexpr std::int64_t kColumns = 7, kMostRare = 64;
  static constexpr double kSteep = 8.0;  // of order |x|
  static constexpr int kGroup = 4;       // models whose rows are read side by side
  static constexpr int kPartial = 32;    // models summed in floats before the sum is widened
  static constexpr int kBurst = 32;      // vectors summed in floats before the sums are widened

  // Tokens of one model that are summed by themselves.
  struct List {
    double *x, *p;
    std::int64_t count = 0;
    void add(double token_x, double token_p) {
      x[count] = token_x;
      p[count++] = token_p;
    }
  };

  struct Constants {
    FloatShift shift;
    float slope, offset;  // delta = slope (r' - 1) + offset
  };

  ModelSums model_sums(double* sums, std::int64_t i) const {
    return {sums + i * ModelSums::size(fit_.degree, plan_.options.num_orders), fit_.degree};
  }

  template <Dtype D>
  void add_tile(std::int64_t begin, std::int64_t length, double* sums) {
    rare_count_ = 0;
    const std::int64_t padded = round_up(length, Flt::kLanes);
    load_public<D>(begin, length, padded);
    const std::int64_t unbalanced = rare_count_;  // not in the lanes at all
    load_models<D>(begin, length);
    prepare(begin, padded);
    if (!serves_) return;
    add_models<D>(begin, padded, sums);
    for (std::int64_t k = 0; k < rare_count_; ++k) {
      const RareToken token(in_, weights_, position_, rare_[k], plan_.options);
      if (k < unbalanced) mean_balance_ += std::exp(token.log_mixture()) - std::exp(token.log_q());
      for (std::int64_t i = 0; i < plan_.models; ++i) add_rare(token, i, model_sums(sums, i));
    }
  }

  template <Dtype D>
  void add_models(std::int64_t begin, std::int64_t padded, double* sums) {
    // High powers of small t leave the range of floats: together less than 1e-30 of a loss.
    const FlushDenormals flush;
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      double* own = accumulators_ + i * (1 + fit_.degree) * Vec::kLanes;
      listed_.count = recomputed_.count = 0;
      const ModelSums to = model_sums(sums, i);
      switch (fit_.degree) {
        case 4:
          add_model<D, 4>(i, begin, padded, own);
          break;
        case 6:
          add_model<D, 6>(i, begin, padded, own);
          break;
        case 10:
          add_model<D, 10>(i, begin, padded, own);
          break;
        default:
          add_model<D, kMaxMoments>(i, begin, padded, own);
      }
      if (listed_.count != 0) add_list(listed_, true, to);
      if (recomputed_.count != 0) add_list(recomputed_, false, to);
    }
  }

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
        middle[half] = plan_.against_public ? zero - first : others - first * missing;
        balance = vfma(weight, mean, balance);
        // A mixture far below q: what cancels in 1 + mean is too much.
        const auto low = (ratio < Vec(0x1p-6)) & (weight > zero);
        lost |= low.bits() << (half * Vec::kLanes);
        const Vec inverse = vselect(low, zero, one / vmax(ratio, Vec(1e-30)));
        p[half] = vselect(low, zero, weight * ratio);
        factor[half] = inverse * Vec(1.0 / (divisor * fit_.reach));
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

  template <Dtype D, int kDegree>
  void add_model(std::int64_t i, std::int64_t begin, std::int64_t padded, double* own) {
    const float* deviations = deviations_ + i * tile_;
    for (std::int64_t start = 0; start < padded; start += kBurst * Flt::kLanes) {
      const std::int64_t stop =
          start + kBurst * Flt::kLanes < padded ? start + kBurst * Flt::kLanes : padded;
      Flt s[kDegree + 1];
      ADAPMIXED_UNROLL
      for (int k = 0; k <= kDegree; ++k) s[k] = Flt(0.0f);
      for (std::int64_t lane = start; lane < stop; lane += Flt::kLanes) {
        Flt t =
            (Flt::load(middle_ + lane) - Flt::load(deviations + lane)) * Flt::load(factor_ + lane);
        Flt p = Flt::load(p_ + lane);
        const Flt square = t * t;
        const auto large = square > Flt(1.0f);
        if (__builtin_expect(large.bits() != 0, 0)) {
          take<D>(i, begin, lane, large.bits(), t, p);
          p = vselect(large, Flt(0.0f), p);
          t = vselect(large, Flt(0.0f), t);
          accumulate<kDegree>(s, p, t, t * t);
        } else {
          accumulate<kDegree>(s, p, t, square);
        }
      }
      ADAPMIXED_UNROLL
      for (int k = 0; k <= kDegree; ++k) {
        double* at = own + k * Vec::kLanes;
        (Vec::load(at) + widened(s[k])).store(at);
      }
    }
  }

  // s[k] += p t^{1+k}: even powers are added, odd ones made of them in the same step.
  template <int kDegree>
  ADAPMIXED_INLINE static void accumulate(Flt* s, Flt p, Flt t, Flt square) {
    s[0] = vfma(p, t, s[0]);
    Flt power = p * square;
    ADAPMIXED_UNROLL
    for (int k = 1; k <= kDegree; k += 2) {
      s[k] = s[k] + power;
      if (k + 1 <= kDegree) s[k + 1] = vfma(power, t, s[k + 1]);
      if (k + 2 <= kDegree) power = power * square;
    }
  }

  template <Dtype D>
  void take(std::int64_t i, std::int64_t begin, std::int64_t lane, unsigned bits, Flt t, Flt p) {
    float ts[Flt::kLanes], ps[Flt::kLanes];
    t.store(ts);
    p.store(ps);
    for (; bits != 0; bits &= bits - 1) {
      const int k = __builtin_ctz(bits);
      const double x = ts[k] * fit_.reach;
      if (ps[k] == 0.0f) continue;
      // What the excess makes of an error of x grows with order |x|, and where 1 + x cancels.
      if (x < -0.5 || std::fabs(x) * plan_.largest_order > kSteep) {
        recomputed_.add(token_excess<D>(i, begin + lane + k), ps[k]);
      } else {
        listed_.add(x, ps[k]);
      }
    }
  }

  // x of one model at one token in double, from all models' logits.
  template <Dtype D>
  double token_excess(std::int64_t i, std::int64_t v) const {
    const std::int64_t models = plan_.models, positions = in_.shape.positions;
    const double z0 = row_of(in_.public_logits, 0, position_).at(v);
    const double public_lse = in_.public_lse[position_];
    const char* data = row_of(in_.private_logits, 0, position_).data;
    const std::int64_t stride = in_.private_logits.stride_model * kElementSize<D>;
    for (std::int64_t j = 0; j < models; ++j) {
      const double z = Row{data + j * stride, D}.at(v);
      ratios_[j] = z - z0 - (in_.private_lse[j * positions + position_] - public_lse);
    }
    for (std::int64_t j = models; j < round_up(models, 8); ++j) ratios_[j] = 0.0;
    for (std::int64_t j = 0; j < models; j += Vec::kLanes) {
      exp_(Vec::load(ratios_ + j)).store(ratios_ + j);
    }
    double total = plan_.absent, rest = plan_.absent;
    for (std::int64_t j = 0; j < models; ++j) {
      const std::int64_t at = j * positions + position_;
      const double ratio = std::fma(weights_.weight[at], ratios_[j], weights_.complement[at]);
      total += ratio;
      if (j != i) rest += ratio;
    }
    if (plan_.against_public) return (rest + 1.0) / total - 1.0;
    return rest * plan_.slots / ((plan_.slots - 1.0) * total) - 1.0;
  }

  void add_rare(const RareToken& token, std::int64_t i, const ModelSums& sums) const {
    const double log_other = token.log_neighbour(i);
    sums.first() += std::exp(log_other) - std::exp(token.log_mixture());
    if (token.negligible()) return;
    for (std::int64_t k = 0; k < plan_.options.num_orders; ++k) {
      ListedSums& to = sums.listed(k);
      const ListedSums before = to;
      token.add(log_other, plan_.options.orders[k], to.forward, to.reverse);
      to.slope +=
          plan_.options.orders[k] * (to.forward - before.forward + to.reverse - before.reverse);
    }
  }

  // rough: their x are floats'.
  void add_list(const List& list, bool rough, const ModelSums& sums) const {
    for (int k = 0; k < Vec::kLanes; ++k) list.x[list.count + k] = list.p[list.count + k] = 0.0;
    Vec first(0.0), second(0.0);
    for (std::int64_t j = 0; j < list.count; j += Vec::kLanes) {
      const Vec x = Vec::load(list.x + j), px = Vec::load(list.p + j) * x;
      first = first + px;
      second = vfma(px, x, second);
    }
    sums.first() += sum(first);
    sums.listed_second() += sum(second);
    for (std::int64_t k = 0; k < plan_.options.num_orders; ++k) {
      ListedSums& to = sums.listed(k);
      double& slope = rough ? to.rough_slope : to.slope;
      slope += plan_.integers[k] != 0 ? add_integer(list, plan_.integers[k], to)
                                      : add_real(list, plan_.options.orders[k], to);
    }
  }

  // Adds the excesses of (1+x)^n and (1+x)^{1-n}; returns the larger slopes, x times the
  // derivative.
  static double add_integer(const List& list, int n, ListedSums& to) {
    const Vec one(1.0), order(n), less(n - 1.0);
    Vec f(0.0), g(0.0), slope(0.0);
    for (std::int64_t j = 0; j < list.count; j += Vec::kLanes) {
      const Vec x = Vec::load(list.x + j), p = Vec::load(list.p + j), X = x + one;
      // (1+x)^{1-n} - 1 - (1-n) x = (1+x) c_n(y), y = -x/(1+x).
      const Vec inverse = one / X, px = p * x;
      const Chain<Vec> up = chain(x, n), down = chain(Vec(0.0) - x * inverse, n);
      f = vfma(p, up.c, f);
      g = vfma(p * X, down.c, g);
      slope = slope + vmax(px * order * ((up.e - x) * inverse), Vec(0.0) - px * less * down.e);
    }
    to.forward += sum(f);
    to.reverse += sum(g);
    return sum(slope);
  }

  static double add_real(const List& list, double order, ListedSums& to) {
    const Vec one(1.0);
    Vec f(0.0), g(0.0), slope(0.0);
    for (std::int64_t j = 0; j < list.count; j += Vec::kLanes) {
      const Vec x = Vec::load(list.x + j), p = Vec::load(list.p + j), X = x + one;
      const LogParts<Vec> l = log_parts(x, X);
      const Power<Vec> up = power(x, l, Vec(order)), down = power(x, l, Vec(1.0 - order));
      f = vfma(p, up.excess, f);
      g = vfma(p, down.excess, g);
      const Vec px = p * x, inverse = one / X;
      slope = slope + vmax(px * Vec(order) * (up.value * inverse - one),
                           px * Vec(1.0 - order) * (down.value * inverse - one));
    }
    to.forward += sum(f);
    to.reverse += sum(g);
    return sum(slope);
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan& plan_;
  const LossFit& fit_;
  std::int64_t position_, tile_;
  double *accumulators_, *spread_;
  Constants* constants_;
  std::int64_t* rare_;
  float *base_, *z0_, *q_, *p_, *middle_, *factor_, *partial_;
  float* deviations_;
  double* ratios_;
  List listed_{}, recomputed_{};
  std::int64_t rare_count_ = 0;
  double mean_balance_ = 0.0, common_ = 0.0;
  bool serves_ = true;
};

ADAPMIXED_CORE_END
