// D<->_alpha(p || p') of every model and order, where p' is the mixture without that model, as an
// upper bound (bound.h).
//
// The vocabulary is cut into chunks whose sums are added in order: the result does not depend on
// the number of threads. Most x = p'/p - 1 (cpu_tile.h) are small: sums of p t^k, t = x / reach,
// serve all orders. Larger ones are listed and summed one by one.
#include <memory>
#include <vector>

#include "common/dispatch.h"
#include "common/parallel.h"
#include "leave_one_out/cpu_tile.h"

ADAPMIXED_CORE_BEGIN
namespace {

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

  Chunk(const Ensemble& in, const Weights& weights, const LossPlan& plan, const LossFit& fit,
        std::int64_t position, double* memory)
      : plan_(plan),
        fit_(fit),
        dtype_(in.private_logits.dtype),
        tile_(in, weights, plan, fit.reach, position, memory),
        rough_(plan, memory + Tile::scratch_size(plan)),
        exact_(plan, memory + Tile::scratch_size(plan) + TokenList::scratch_size(plan)),
        accumulators_(memory + Tile::scratch_size(plan) + 2 * TokenList::scratch_size(plan)) {}

  // Adds to the sums of all models, one after the other. Returns false if no loss of the position
  // can be bounded.
  bool add(std::int64_t begin, std::int64_t end, double* sums) {
    const std::int64_t each = (1 + fit_.degree) * Vec::kLanes;
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
      to.first() += sum(Vec::load(own)) * fit_.reach;
      for (int k = 0; k < fit_.degree; ++k) {
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
    return {sums + i * ModelSums::size(fit_.degree, plan_.options.num_orders), fit_.degree};
  }

  void add_models(std::int64_t length, double* sums) {
    // High powers of small t leave the range of floats; together they are less than 1e-30 of a
    // loss.
    const FlushDenormals flush;
    const std::int64_t padded = round_up(length, Flt::kLanes);
    for (std::int64_t i = 0; i < plan_.models; ++i) {
      switch (fit_.degree) {
        case 4:
          add_model<4>(i, padded);
          break;
        case 6:
          add_model<6>(i, padded);
          break;
        case 10:
          add_model<10>(i, padded);
          break;
        default:
          add_model<kMaxMoments>(i, padded);
      }
      rough_.add_to(model_sums(sums, i), true, fit_.reach);
      exact_.add_to(model_sums(sums, i), false, fit_.reach);
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
      const Neighbour other = neighbour_of(ts[k] * fit_.reach);
      if (p != 0.0) (tile_.in_double(lane) ? exact_ : rough_).add(other.x, other.X, p);
    }
  }

  const LossPlan& plan_;
  const LossFit& fit_;
  Dtype dtype_;
  Tile tile_;
  TokenList rough_, exact_;  // of tokens in single precision, and in double
  double* accumulators_;
};

class Call {
 public:
  Call(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options, double* loss,
       double* balance, int threads)
      : in_(in),
        weights_(weights),
        plan_(in.shape, options),
        loss_(loss),
        balance_(balance),
        threads_(threads),
        chunks_((plan_.vocab + plan_.chunk() - 1) / plan_.chunk()) {}

  void run() {
    const std::int64_t positions = in_.shape.positions;
    if (positions == 0) return;
    choose_fits();
    // Positions are summed in groups: the chunks' sums take at most 32 MB, or one position's worth.
    const std::int64_t fit = (std::int64_t{1} << 22) / (chunks_ * chunk_size());
    const std::int64_t group = fit < 1 ? 1 : fit < positions ? fit : positions;
    double* memory = cpu::thread_scratch(group * chunks_ * chunk_size(), 1);
    for (std::int64_t first = 0; first < positions; first += group) {
      const std::int64_t left = positions - first;
      sum_chunks(first, left < group ? left : group, memory);
    }
  }

 private:
  std::int64_t stride(int degree) const {
    return ModelSums::size(degree, plan_.options.num_orders);
  }
  // The number of doubles for one chunk of one position: the models' sums and the TokenSums.
  std::int64_t chunk_size() const {
    return in_.shape.models * stride(kMaxMoments) + sizeof(TokenSums) / sizeof(double);
  }
  TokenSums* token_sums(double* of_chunk) const {
    return reinterpret_cast<TokenSums*>(of_chunk + in_.shape.models * stride(kMaxMoments));
  }

  // Chooses the degree of each position from its largest weight, and computes the fits that are
  // needed.
  void choose_fits() {
    const std::int64_t positions = in_.shape.positions;
    fits_.reset(new const LossFit*[positions]);
    // Kept between calls, because consecutive calls mostly have the same orders.
    thread_local std::vector<double> orders;
    thread_local std::unique_ptr<LossFit> known[kMaxMoments + 1];
    const std::vector<double> now(plan_.options.orders,
                                  plan_.options.orders + plan_.options.num_orders);
    if (orders != now) {
      for (auto& fit : known) fit.reset();
      orders = now;
    }
    for (std::int64_t b = 0; b < positions; ++b) {
      const int degree = degree_at(loss_degree(plan_, largest_weight(b)));
      auto& fit = known[degree];
      if (!fit) {
        fit.reset(new LossFit);
        plan_.fit_all(degree, *fit);
      }
      fits_[b] = fit.get();
    }
  }

  double largest_weight(std::int64_t position) const {
    if (weights_.upper > 0.0) return weights_.upper;
    double largest = 0.0;
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      largest = std::fmax(largest, weights_.weight[i * in_.shape.positions + position]);
    }
    return largest;
  }

  // A position whose losses cannot be bounded gets an infinite growth.
  void sum_chunks(std::int64_t first, std::int64_t count, double* memory) {
    const std::int64_t models = in_.shape.models, length = plan_.chunk(), each = chunk_size();
    cpu::parallel_for(count * chunks_, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      double* scratch = cpu::thread_scratch(Chunk::scratch_size(plan_));
      for (std::int64_t task = begin; task < end; ++task) {
        const std::int64_t position = first + task / chunks_, start = task % chunks_ * length;
        const std::int64_t stop = start + length < plan_.vocab ? start + length : plan_.vocab;
        const LossFit& fit = *fits_[position];
        double* own = memory + task * each;
        for (std::int64_t k = 0; k < models * stride(fit.degree); ++k) own[k] = 0.0;
        Chunk chunk(in_, weights_, plan_, fit, position, scratch);
        const bool bounded = chunk.add(start, stop, own);
        *token_sums(own) = chunk.token_sums();
        if (!bounded) token_sums(own)->growth = HUGE_VAL;
      }
    });
    cpu::parallel_for(count, 1, threads_, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        double* total = memory + b * chunks_ * each;
        for (std::int64_t c = 1; c < chunks_; ++c) {
          double* own = total + c * each;
          for (std::int64_t k = 0; k < models * stride(fits_[first + b]->degree); ++k) {
            total[k] += own[k];
          }
          token_sums(total)->add(*token_sums(own));
        }
        finish(first + b, total, *token_sums(total));
      }
    });
  }

  void finish(std::int64_t position, double* sums, const TokenSums& tokens) {
    const std::int64_t models = in_.shape.models, orders = plan_.options.num_orders;
    const LossFit& fit = *fits_[position];
    const auto model = [&](std::int64_t i) {
      return ModelSums{sums + i * stride(fit.degree), fit.degree};
    };
    double mean_norm = 0.0, ratio_error = 0.0;
    for (std::int64_t i = 0; i < models; ++i) {
      const std::int64_t at = i * in_.shape.positions + position;
      // Against the public distribution sum p x = -(sum q delta) / slots. Otherwise it is the mean
      // of sum q delta minus this model's, divided by slots - 1.
      balance_[at] = tokens.growth == HUGE_VAL ? 0.0
                     : plan_.against_public
                         ? -plan_.slots * model(i).first()
                         : tokens.balance - (plan_.slots - 1.0) * model(i).first();
      mean_norm += std::sqrt(model(i).second(fit.reach)) / static_cast<double>(models);
      ratio_error =
          std::fmax(ratio_error, double_ratio_error(in_.private_lse[at], in_.public_lse[position]));
    }
    const LossBound bound(plan_, fit.reach, fit.degree, tokens, mean_norm, largest_weight(position),
                          ratio_error);
    bool all_public = mean_norm == 0.0;
    for (std::int64_t i = 0; all_public && i < models; ++i) {
      all_public = answers_public(i, position);
    }
    for (std::int64_t i = 0; i < models; ++i) {
      double* out = loss_ + (i * in_.shape.positions + position) * orders;
      const ModelSums own = model(i);
      const bool nothing = plan_.against_public
                               ? own.second(fit.reach) == 0.0 && answers_public(i, position)
                               : all_public;
      for (std::int64_t k = 0; k < orders; ++k) {
        const double order = plan_.options.orders[k];
        const double forward =
            bound.excess(fit.forward[k].view(), own.moments(), own.listed(k, false), order);
        const double reverse =
            bound.excess(fit.reverse[k].view(), own.moments(), own.listed(k, true), order);
        out[k] = tokens.growth == HUGE_VAL ? HUGE_VAL
                 : nothing                 ? 0.0
                                           : divergence_from_excess(forward, reverse, order);
      }
    }
  }

  // Whether p_bar_i is q, exactly.
  bool answers_public(std::int64_t i, std::int64_t position) const {
    const std::int64_t at = i * in_.shape.positions + position;
    if (weights_.upper == 0.0 && weights_.weight[at] == 0.0) return true;
    if (weights_.active != nullptr && !weights_.active[at]) return true;
    if (in_.private_lse[at] != in_.public_lse[position]) return false;
    const Row own = row_of(in_.private_logits, i, position);
    const Row other = row_of(in_.public_logits, 0, position);
    for (std::int64_t v = 0; v < plan_.vocab; ++v) {
      if (own.at(v) != other.at(v)) return false;
    }
    return true;
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LossPlan plan_;
  std::unique_ptr<const LossFit*[]> fits_;
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
