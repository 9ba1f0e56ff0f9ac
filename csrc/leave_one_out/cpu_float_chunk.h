// A stretch of one position's vocabulary in single precision: the leave-one-out sums of all models.
//
// For each tile the deviations of all models are formed (cpu_deviation_tile.h). Then, model by
// model, the neighbour's x_i = p'/p - 1 is the difference of two of the tile's numbers times a
// factor of the token. Most x are small: sums of p t^k, t = x / reach, serve all orders. Larger
// ones are listed and summed one by one; the steepest are first computed again in double. Tokens
// for which floats are not accurate enough are summed in the log domain.
#pragma once

#include <initializer_list>

#include "leave_one_out/cpu_deviation_tile.h"
#include "leave_one_out/cpu_plan.h"
#include "leave_one_out/cpu_token_list.h"
#include "leave_one_out/rare.h"

ADAPMIXED_CORE_BEGIN

class FloatChunk {
 public:
  static std::int64_t scratch_size(const LossPlan& plan, int degree) {  // in doubles
    const std::int64_t tile = plan.tile(), models = plan.models;
    return DeviationTile::scratch_size(plan) + 5 * (tile + 16) +
           models * (1 + degree) * Vec::kLanes;
  }

  FloatChunk(const Ensemble& in, const Weights& weights, const LossPlan& plan, const LossFit& fit,
             std::int64_t position, Arithmetic arithmetic, double* memory)
      : in_(in),
        weights_(weights),
        plan_(plan),
        fit_(fit),
        position_(position),
        tile_(in, weights, plan, fit.reach, position, arithmetic, memory) {
    memory += DeviationTile::scratch_size(plan);
    accumulators_ = memory;
    memory += plan.models * (1 + fit.degree) * Vec::kLanes;
    for (double** column :
         {&listed_.xs, &listed_.ps, &listed_.means, &recomputed_.xs, &recomputed_.ps}) {
      *column = memory;
      memory += plan.tile() + 16;
    }
  }

  // Adds to the sums of all models, one after the other. Returns false if floats cannot serve this
  // stretch.
  bool add(std::int64_t begin, std::int64_t end, double* sums) {
    const std::int64_t size = plan_.models * (1 + fit_.degree) * Vec::kLanes;
    for (std::int64_t k = 0; k < size; ++k) accumulators_[k] = 0.0;
    bool served = true;
    const std::int64_t width = plan_.tile();
    with_dtype(in_.private_logits.dtype, [&](auto tag) {
      for (std::int64_t v = begin; v < end && served; v += width) {
        served = add_tile<decltype(tag)::value>(v, v + width < end ? width : end - v, sums);
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
    return served;
  }

  TokenSums token_sums() const {
    TokenSums sums = tile_.sums();
    sums.rough = rough_;
    sums.balance += rare_balance_;
    return sums;
  }

 private:
  static constexpr double kSteep = 5.0;  // limit on order |x|
  static constexpr int kBurst = 16;      // vectors summed in floats before the sums are widened
  static_assert(kBurst <= kMomentAdditions);

  ModelSums model_sums(double* sums, std::int64_t i) const {
    return {sums + i * ModelSums::size(fit_.degree, plan_.options.num_orders), fit_.degree};
  }

  template <Dtype D>
  bool add_tile(std::int64_t begin, std::int64_t length, double* sums) {
    if (!tile_.load<D>(begin, length)) return false;
    add_models<D>(begin, round_up(length, Flt::kLanes), sums);
    for (std::int64_t k = 0; k < tile_.rare_count(); ++k) {
      const RareToken token(in_, weights_, position_, tile_.rare(k), plan_);
      if (!tile_.balances(k)) {
        rare_balance_ += std::exp(token.log_mixture()) - std::exp(token.log_q());
      }
      for (std::int64_t i = 0; i < plan_.models; ++i) add_rare(token, i, model_sums(sums, i));
    }
    return true;
  }

  template <Dtype D>
  void add_models(std::int64_t begin, std::int64_t padded, double* sums) {
    // High powers of small t leave the range of floats; together they are less than 1e-30 of a
    // loss.
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
      if (listed_.count != 0) {
        listed_.set_excess(plan_, weights_.weight[i * in_.shape.positions + position_]);
        listed_.add_to(plan_, !tile_.exact(), to);
      }
      if (recomputed_.count != 0) recomputed_.add_to(plan_, false, to);
    }
  }

  template <Dtype D, int kDegree>
  void add_model(std::int64_t i, std::int64_t begin, std::int64_t padded, double* own) {
    const float* deviations = tile_.deviations(i);
    const float *middle = tile_.middle(), *factor = tile_.factor(), *mixture = tile_.p();
    for (std::int64_t start = 0; start < padded; start += kBurst * Flt::kLanes) {
      const std::int64_t stop =
          start + kBurst * Flt::kLanes < padded ? start + kBurst * Flt::kLanes : padded;
      Flt s[kDegree + 1];
      ADAPMIXED_UNROLL
      for (int k = 0; k <= kDegree; ++k) s[k] = Flt(0.0f);
      for (std::int64_t lane = start; lane < stop; lane += Flt::kLanes) {
        Flt t =
            (Flt::load(middle + lane) - Flt::load(deviations + lane)) * Flt::load(factor + lane);
        Flt p = Flt::load(mixture + lane);
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

  // s[k] += p t^{1+k}: the even powers are added, and the odd ones computed from them in the same
  // step.
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
      const std::int64_t v = begin + lane + k;
      if (ps[k] == 0.0f || v >= plan_.vocab) continue;
      if (!(ps[k] > 0.0f)) {
        recomputed_.add(x, ps[k]);  // NaN: makes the sums NaN
        continue;
      }
      if (x < -0.5) {  // 1 + x cancels
        const double mean = tile_.template exact_mean<D>(begin, lane + k);
        recomputed_.add(tile_.token().template excess_from_rest<D>(i, v),
                        tile_.mixture(lane + k, mean));
        continue;
      }
      const std::int64_t at = i * in_.shape.positions + position_;
      const double z = row_of(in_.private_logits, i, position_).at(v);
      const double z0 = row_of(in_.public_logits, 0, position_).at(v);
      const double log_ratio = z - z0 - (in_.private_lse[at] - in_.public_lse[position_]);
      // An error of x grows in the excess by a factor of order |x|.
      if (!tile_.exact() && std::fabs(x) * plan_.largest_order > kSteep) {
        const double mean = tile_.template exact_mean<D>(begin, lane + k);
        recomputed_.add(plan_.excess(weights_.weight[at] * ratio(log_ratio).d, mean),
                        tile_.mixture(lane + k, mean));
      } else {
        listed_.add_ratio(log_ratio, tile_.mean(lane + k), ps[k]);
        rough_ = std::fmax(rough_, tile_.spread(lane + k));
      }
    }
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

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan& plan_;
  const LossFit& fit_;
  std::int64_t position_;
  DeviationTile tile_;
  double* accumulators_;
  TokenList listed_{}, recomputed_{};
  double rare_balance_ = 0.0, rough_ = 0.0;
};

ADAPMIXED_CORE_END
