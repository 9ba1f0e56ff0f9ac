// The sums of all models over a chunk of one position's vocabulary. Most x = p'/p - 1 (cpu_tile.h)
// are small: sums of p t^k, t = x / reach, serve all orders. Larger ones are listed and summed one
// by one.
#pragma once

#include "leave_one_out/cpu_tile.h"

ADAPMIXED_CORE_BEGIN

// Tokens of one model whose excess is summed one by one.
class TokenList {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) { return 3 * (plan.tile() + Flt::kLanes); }

  TokenList(const LossPlan& plan, double* memory)
      : plan_(plan), most_log_(static_cast<float>(80.0 / plan.largest_order)) {
    for (double** column : {&xs_, &ratios_, &ps_}) {
      *column = memory, memory += plan.tile() + Flt::kLanes;
    }
  }

  void add(double x, double X, double p) {
    xs_[count_] = x, ratios_[count_] = X, ps_[count_++] = p;
  }

  // Adds the sums over the list, which is empty afterwards. rough: x are in single precision.
  void add_to(const ModelSums& sums, bool rough, double reach) {
    if (count_ == 0) return;
    const Flt least(static_cast<float>(reach));
    for (int k = 0; k < Flt::kLanes; ++k) {
      xs_[count_ + k] = 0.0, ratios_[count_ + k] = ps_[count_ + k] = 1.0;
    }
    for (std::int64_t j = 0; j < count_; j += Flt::kLanes) {
      const Vec low = Vec::load(xs_ + j), high = Vec::load(xs_ + j + Vec::kLanes);
      const Vec p_low = Vec::load(ps_ + j), p_high = Vec::load(ps_ + j + Vec::kLanes);
      sums.first() += sum(vfma(p_low, low, p_high * high));
      sums.listed_second() += sum(vfma(p_low * low, low, p_high * high * high));
      const Flt x = narrow(low, high), p = narrow(p_low, p_high);
      const Flt X = narrow(Vec::load(ratios_ + j), Vec::load(ratios_ + j + Vec::kLanes));
      const FloatLog<Flt> log = float_log(x, X);
      const auto wide = (vabs(log.log) > Flt(most_log_)) | (Flt(1e-30f) > p);
      const Flt size = vabs(log.log), share = least / vmax(vabs(x), least);
      for (std::int64_t k = 0; k < 2 * plan_.options.num_orders; ++k) {
        const double order = plan_.options.orders[k / 2], s = k % 2 == 0 ? order : 1.0 - order;
        ListedSums& to = sums.listed(k / 2, k % 2 != 0);
        if (wide.bits() == 0 && order > kLeastFloatOrder) {
          const Flt term = p * power_excess(x, log, Flt(static_cast<float>(s)));
          float found[4];
          sum_four({term, term * size, term * share, term * size * share}, found);
          to.add({found[0], found[1], found[2], found[3]}, s, true, rough);
        } else {
          add_in_double(j, s, to, rough, reach);
          add_in_double(j + Vec::kLanes, s, to, rough, reach);
        }
      }
    }
    count_ = 0;
  }

 private:
  void add_in_double(std::int64_t j, double s, ListedSums& to, bool rough, double reach) const {
    const Vec x = Vec::load(xs_ + j), least(reach), share = least / vmax(vabs(x), least);
    const LogParts<Vec> log = log_parts(x, Vec::load(ratios_ + j));
    const Vec term = Vec::load(ps_ + j) * power(x, log, Vec(s)).excess;
    const Vec sized = term * vabs(log.log);
    to.add({sum(term), sum(sized), sum(term * share), sum(sized * share)}, s, false, rough);
  }

  const LossPlan& plan_;
  double *xs_, *ratios_, *ps_;  // p'/p - 1, p'/p and p, with room for one more vector
  std::int64_t count_ = 0;
  float most_log_;  // such that powers stay within the range of floats
};

// The sums of all models over a chunk of one position's vocabulary.
class Chunk {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) {  // in doubles
    return Tile::scratch_size(plan) + 2 * TokenList::scratch_size(plan) +
           plan.models * (1 + kMaxMoments) * Vec::kLanes;
  }

  Chunk(const Ensemble& in, const Weights& weights, const LossPlan& plan,
        const MomentChoice& choice, std::int64_t position, double* memory)
      : plan_(plan),
        choice_(choice),
        dtype_(in.private_logits.dtype),
        tile_(in, weights, plan, choice.reach, position, memory),
        rough_(plan, memory + Tile::scratch_size(plan)),
        exact_(plan, memory + Tile::scratch_size(plan) + TokenList::scratch_size(plan)),
        accumulators_(memory + Tile::scratch_size(plan) + 2 * TokenList::scratch_size(plan)) {}

  // Adds to the sums of all models, one after the other. Returns false if no loss of the position
  // can be bounded.
  bool add(std::int64_t begin, std::int64_t end, double* sums) {
    const std::int64_t each = (1 + choice_.degree) * Vec::kLanes;
    for (std::int64_t k = 0; k < plan_.models * each; ++k) accumulators_[k] = 0.0;
    bool bounded = true;
    for (std::int64_t v = begin; v < end && bounded; v += plan_.tile()) {
      const std::int64_t length = v + plan_.tile() < end ? plan_.tile() : end - v;
      with_dtype(dtype_, [&](auto tag) { bounded = tile_.load<decltype(tag)::value>(v, length); });
      if (bounded) add_models(length, sums);
    }
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const double* own = accumulators_ + i * each;
      const ModelSums to = model_sums(sums, i);
      to.first() += sum(Vec::load(own)) * choice_.reach;
      for (int k = 0; k < choice_.degree; ++k) {
        to.moments()[k] += sum(Vec::load(own + (1 + k) * Vec::kLanes));
      }
    }
    return bounded;
  }

  const TokenSums& token_sums() const { return tile_.sums(); }

 private:
  static constexpr int kBurst = 16;  // vectors summed in floats before the sums are widened
  static_assert(kBurst <= kMomentAdditions);

  ModelSums model_sums(double* sums, std::int64_t i) const {
    return {sums + i * ModelSums::size(choice_.degree, plan_.options.num_orders), choice_.degree};
  }

  void add_models(std::int64_t length, double* sums) {
    // High powers of small t leave the range of floats; together they are less than 1e-30 of a
    // loss.
    const FlushDenormals flush;
    const std::int64_t padded = round_up(length, Flt::kLanes);
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      with_degree(choice_.degree, [&](auto d) { add_model<decltype(d)::value>(i, padded); });
      rough_.add_to(model_sums(sums, i), true, choice_.reach);
      exact_.add_to(model_sums(sums, i), false, choice_.reach);
    }
  }

  template <int kDegree>
  void add_model(std::int64_t i, std::int64_t padded) {
    double* own = accumulators_ + i * (1 + kDegree) * Vec::kLanes;
    const float *deviations = tile_.deviations(i), *mixture = tile_.p();
    const float *middle = tile_.middle(), *factor = tile_.factor();
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
          list(lane, large.bits(), t);
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

  void list(std::int64_t lane, unsigned bits, Flt t) {
    float ts[Flt::kLanes];
    t.store(ts);
    for (; bits != 0; bits &= bits - 1) {
      const int k = __builtin_ctz(bits);
      const double p = tile_.mixture(lane + k);
      const Neighbour other = neighbour_of(ts[k] * choice_.reach);
      if (p != 0.0) (tile_.in_double(lane) ? exact_ : rough_).add(other.x, other.X, p);
    }
  }

  const LossPlan& plan_;
  const MomentChoice& choice_;
  Dtype dtype_;
  Tile tile_;
  TokenList rough_, exact_;  // of tokens in single precision, and in double
  double* accumulators_;
};

ADAPMIXED_CORE_END
