// D<->_alpha(p || p') of every model and order, where p' is the mixture without that model, as an
// upper bound.
//
// The vocabulary is cut into chunks whose sums are added in order: the result does not depend on
// the number of threads. Most x = p'/p - 1 (cpu_tile.h) are small: sums of p t^k, t = x / reach,
// serve all orders. Larger ones are listed and summed one by one.
#include <vector>

#include "common/operators.h"
#include "common/parallel.h"
#include "leave_one_out/cpu_tile.h"

ADAPMIXED_CORE_BEGIN
namespace {

// Tokens of one model whose excess is summed one by one.
class TokenList {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) { return 4 * (plan.tile + Flt::kLanes); }

  TokenList(const LossPlan& plan, double* memory)
      : plan_(plan), most_log_(static_cast<float>(80.0 / plan.largest_order)) {
    for (double** column : {&xs_, &ratios_, &ps_, &errors_}) {
      *column = memory, memory += plan.tile + Flt::kLanes;
    }
  }

  // error: of x in single precision, relative to it.
  void add(const Neighbour& other, double p, double error) {
    xs_[count_] = other.x, ratios_[count_] = other.X, ps_[count_] = p, errors_[count_++] = error;
  }

  // Adds the sums over the list, which is empty afterwards.
  void add_to(const ModelSums& sums) {
    if (count_ == 0) return;
    for (int k = 0; k < Flt::kLanes; ++k) {
      xs_[count_ + k] = errors_[count_ + k] = 0.0, ratios_[count_ + k] = ps_[count_ + k] = 1.0;
    }
    for (std::int64_t j = 0; j < count_; j += Flt::kLanes) {
      const Vec low = Vec::load(xs_ + j), high = Vec::load(xs_ + j + Vec::kLanes);
      const Vec p_low = Vec::load(ps_ + j), p_high = Vec::load(ps_ + j + Vec::kLanes);
      sums[0] += sum(vfma(p_low, low, p_high * high));
      sums[1] += sum(vfma(p_low * low, low, p_high * high * high));
      const Flt x = narrow(low, high), p = narrow(p_low, p_high);
      const Flt X = narrow(Vec::load(ratios_ + j), Vec::load(ratios_ + j + Vec::kLanes));
      const FloatLog<Flt> log = float_log(x, X);
      const auto wide = (vabs(log.log) > Flt(most_log_)) | (Flt(1e-30f) > p);
      const Flt size = vabs(log.log);
      const Flt error = narrow(Vec::load(errors_ + j), Vec::load(errors_ + j + Vec::kLanes));
      for (std::int64_t k = 0; k < sums.orders; ++k) {
        for (const bool reverse : {false, true}) {
          const double order = plan_.orders[k], s = reverse ? 1.0 - order : order;
          auto& to = reinterpret_cast<ListedSums&>(sums.listed(k, reverse)[0]);
          if (wide.bits() == 0 && order > kLeastFloatOrder) {
            const Flt term = p * power_excess(x, log, Flt(static_cast<float>(s)));
            float found[4];
            sum_four({term, term * size, term * error, term * size * error}, found);
            to.add({found[0], found[1], found[2], found[3]}, s, true);
          } else {
            add_in_double(j, s, to);
            add_in_double(j + Vec::kLanes, s, to);
          }
        }
      }
    }
    count_ = 0;
  }

 private:
  void add_in_double(std::int64_t j, double s, ListedSums& to) const {
    const Vec x = Vec::load(xs_ + j), error = Vec::load(errors_ + j);
    const LogParts<Vec> log = log_parts(x, Vec::load(ratios_ + j));
    const Vec term = Vec::load(ps_ + j) * power(x, log, Vec(s)).excess;
    const Vec sized = term * vabs(log.log);
    to.add({sum(term), sum(sized), sum(term * error), sum(sized * error)}, s, false);
  }

  const LossPlan& plan_;
  double *xs_, *ratios_, *ps_, *errors_;  // p'/p - 1, p'/p, p, error, and room for a vector more
  std::int64_t count_ = 0;
  float most_log_;  // such that powers stay within the range of floats
};

// What the weights and log-sum-exps of a position say.
struct Facts {
  double ratio_error;
  FloatErrors errors;
  MomentChoice moments;
};

// The sums of all models over a chunk of one position's vocabulary.
class Chunk {
 public:
  static std::int64_t scratch_size(const LossPlan& plan) {  // in doubles
    return Tile::scratch_size(plan) + TokenList::scratch_size(plan) +
           plan.models * (2 + kMaxMoments) * Vec::kLanes;
  }

  Chunk(const Ensemble& in, const Weights& weights, const LossPlan& plan, const Facts& facts,
        std::int64_t position, double* memory)
      : plan_(plan),
        errors_(facts.errors),
        moments_(facts.moments),
        dtype_(in.private_logits.dtype),
        tile_(in, weights, plan, facts.moments.reach, facts.errors.mean_weight, position, memory),
        list_(plan, memory += Tile::scratch_size(plan)),
        accumulators_(memory + TokenList::scratch_size(plan)) {}

  // Adds to the sums of all models, which lie one after the other.
  TokenSums add(std::int64_t begin, std::int64_t end, double* sums) {
    const std::int64_t each = (2 + moments_.degree) * Vec::kLanes;
    for (std::int64_t k = 0; k < plan_.models * each; ++k) accumulators_[k] = 0.0;
    for (std::int64_t v = begin; v < end; v += plan_.tile) {
      const std::int64_t stop = v + plan_.tile < end ? v + plan_.tile : end;
      with_dtype(dtype_, [&](auto tag) { tile_.load<decltype(tag)::value>(v, stop); });
      // High powers of small t leave the range of floats; together they are less than 1e-30 of a
      // loss.
      const FlushDenormals flush;
      for (std::int64_t i = 0; i < plan_.models; ++i) {
        with_degree(moments_.degree, [&](auto d) { add_model<decltype(d)::value>(i); });
        list_.add_to(plan_.sums_of(sums, i, moments_.degree));
      }
    }
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      const double* own = accumulators_ + i * each;
      const ModelSums to = plan_.sums_of(sums, i, moments_.degree);
      to[0] += sum(Vec::load(own)) * moments_.reach;
      to[2] += sum(Vec::load(own + (1 + moments_.degree) * Vec::kLanes));
      for (int k = 0; k < moments_.degree; ++k) {
        to.moments()[k] += sum(Vec::load(own + (1 + k) * Vec::kLanes));
      }
    }
    return tile_.sums();
  }

 private:
  static constexpr int kBurst = 16;  // vectors summed in floats before the sums are widened
  static_assert(kBurst <= kMomentAdditions);

  template <int kDegree>
  void add_model(std::int64_t i) {
    double* own = accumulators_ + i * (2 + kDegree) * Vec::kLanes;
    const float *deviations = tile_.deviations(i), *mixture = tile_.p();
    const float *middle = tile_.middle(), *factor = tile_.factor();
    const std::int64_t padded = tile_.padded();
    for (std::int64_t start = 0; start < padded; start += kBurst * Flt::kLanes) {
      const std::int64_t stop =
          start + kBurst * Flt::kLanes < padded ? start + kBurst * Flt::kLanes : padded;
      Flt s[kDegree + 2];
      ADAPMIXED_UNROLL
      for (int k = 0; k <= kDegree + 1; ++k) s[k] = Flt(0.0f);
      for (std::int64_t lane = start; lane < stop; lane += Flt::kLanes) {
        Flt t =
            vfma(Flt::load(deviations + lane), Flt::load(factor + lane), Flt::load(middle + lane));
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
      for (int k = 0; k <= kDegree + 1; ++k) {
        double* at = own + k * Vec::kLanes;
        (Vec::load(at) + widened(s[k])).store(at);
      }
    }
  }

  // s[k] += p t^{1+k}, the odd powers from the even ones. The last one is the sum of p |t|.
  template <int kDegree>
  ADAPMIXED_INLINE static void accumulate(Flt* s, Flt p, Flt t, Flt square) {
    s[0] = vfma(p, t, s[0]);
    s[kDegree + 1] = vfma(p, vabs(t), s[kDegree + 1]);
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
      const double p = tile_.mixture(lane + k), reach = moments_.reach;
      const double factor = -reach * tile_.factor()[lane + k];
      if (p == 0.0) continue;
      const Neighbour other(ts[k] * reach);
      const double middle = reach * std::fabs(tile_.middle()[lane + k]);
      list_.add(other, p, factor < 0.0 ? 0.0 : errors_.of(other.x, middle, factor));
    }
  }

  const LossPlan& plan_;
  const FloatErrors& errors_;
  const MomentChoice& moments_;
  Dtype dtype_;
  Tile tile_;
  TokenList list_;
  double* accumulators_;
};

class Call {
 public:
  Call(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options, double* loss,
       double* balance, int threads)
      : in_(in),
        weights_(weights),
        plan_(in.shape, weights.upper > 0.0, options),
        fits_(fits_of(options.orders, options.num_orders)),
        loss_(loss),
        balance_(balance),
        threads_(threads),
        chunks_((plan_.vocab + plan_.chunk - 1) / plan_.chunk) {}

  // Positions are summed in groups: the chunks' sums take at most 32 MB, or one position's worth.
  void run() {
    const std::int64_t positions = in_.shape.positions;
    if (positions == 0) return;
    for (std::int64_t b = 0; b < positions; ++b) facts_.push_back(facts(b));
    const std::int64_t most = (std::int64_t{1} << 22) / (chunks_ * chunk_size());
    const std::int64_t group = most < 1 ? 1 : most < positions ? most : positions;
    double* memory = cpu::thread_scratch(group * chunks_ * chunk_size(), 1);
    for (std::int64_t first = 0; first < positions; first += group) {
      const std::int64_t left = positions - first;
      sum_chunks(first, left < group ? left : group, memory);
    }
  }

 private:
  // The number of doubles for one chunk of one position: the models' sums and the TokenSums.
  std::int64_t numbers(int degree) const {
    return in_.shape.models * ModelSums::columns(degree, plan_.num_orders);
  }
  std::int64_t chunk_size() const {
    return numbers(kMaxMoments) + sizeof(TokenSums) / sizeof(double);
  }
  TokenSums& token_sums(double* of_chunk) const {
    return *reinterpret_cast<TokenSums*>(of_chunk + numbers(kMaxMoments));
  }

  Facts facts(std::int64_t position) const {
    double weight = weights_.upper, mean = 0.0, error = 0.0;
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      const std::int64_t at = i * in_.shape.positions + position;
      mean += weights_.weight[at] / plan_.slots;
      if (weights_.upper == 0.0) weight = std::fmax(weight, weights_.weight[at]);
      error = std::fmax(error, double_ratio_error(in_.private_lse[at], in_.public_lse[position]));
    }
    return {error, {plan_, weight, mean, error}, plan_.moments(weight)};
  }

  void sum_chunks(std::int64_t first, std::int64_t count, double* memory) {
    const std::int64_t length = plan_.chunk, each = chunk_size();
    cpu::parallel_for(count * chunks_, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      double* scratch = cpu::thread_scratch(Chunk::scratch_size(plan_));
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t position = first + task / chunks_, start = task % chunks_ * length;
        const std::int64_t stop = start + length < plan_.vocab ? start + length : plan_.vocab;
        const Facts& facts = facts_[position];
        double* own = memory + task * each;
        for (std::int64_t k = 0; k < numbers(facts.moments.degree); ++k) own[k] = 0.0;
        token_sums(own) =
            Chunk(in_, weights_, plan_, facts, position, scratch).add(start, stop, own);
      }
    });
    cpu::parallel_for(count, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        double* total = memory + b * chunks_ * each;
        for (std::int64_t c = 1; c < chunks_; ++c) {
          double* own = total + c * each;
          const std::int64_t count = numbers(facts_[first + b].moments.degree);
          for (std::int64_t k = 0; k < count; ++k) total[k] += own[k];
          add_to(token_sums(total), token_sums(own));
        }
        finish(first + b, total, token_sums(total));
      }
    });
  }

  void finish(std::int64_t position, double* sums, const TokenSums& tokens) {
    const std::int64_t models = in_.shape.models;
    const Facts& facts = facts_[position];
    const bool bounded = tokens.growth < HUGE_VAL;
    double mean_norm = 0.0;
    for (std::int64_t i = 0; i < models; ++i) {
      const ModelSums own = plan_.sums_of(sums, i, facts.moments.degree);
      balance_[i * in_.shape.positions + position] =
          bounded ? plan_.balance(own[0], tokens.balance) : 0.0;
      if (own.second(facts.moments.reach) == 0.0 &&
          !answers_public(in_, weights_, i, position, 0, plan_.vocab)) {
        own.moments()[0] = kHidden;
      }
      mean_norm += std::sqrt(own.second(facts.moments.reach)) / static_cast<double>(models);
    }
    const LossBound bound(plan_, facts.moments, tokens, mean_norm, facts.errors, facts.ratio_error);
    for (std::int64_t i = 0; i < models; ++i) {
      const ModelSums own = plan_.sums_of(sums, i, facts.moments.degree);
      double* out = loss_ + (i * in_.shape.positions + position) * plan_.num_orders;
      for (std::int64_t k = 0; k < plan_.num_orders; ++k) {
        const auto& fits = fits_.of[k][facts.moments.index];
        out[k] = bounded ? bound.loss(fits, own, k, plan_.orders[k]) : HUGE_VAL;
      }
    }
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan plan_;
  const ExcessFits<kMaxOrders>& fits_;
  std::vector<Facts> facts_;
  double *loss_, *balance_;
  int threads_;
  std::int64_t chunks_;
};

void leave_one_out(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
                   double* loss, double* balance, int threads) {
  Call(in, weights, options, loss, balance, threads).run();
}

}  // namespace

void add_leave_one_out(cpu::Table& table) { table.leave_one_out = leave_one_out; }

ADAPMIXED_CORE_END
