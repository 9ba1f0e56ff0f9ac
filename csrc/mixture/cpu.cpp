// p = mean_i p_bar_i, the distribution from which the token is drawn. Each slot adds s_i p_i, the
// exponential of a logit, clipped if there is a box, and a share of q.
#include "common/exp_from.h"
#include "common/operators.h"
#include "common/parallel.h"
#include "common/rows.h"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN
namespace {

// Tokens in a tile, such that its data stay in the first-level cache.
constexpr std::int64_t kTile = 1024;

// A stretch of one position's vocabulary. Models are added one after another.
class Tile {
 public:
  static constexpr std::int64_t kScratch = 2 * kTile;

  Tile(const Ensemble& in, const Weights& weights, std::int64_t position, double* memory)
      : in_(in), weights_(weights), position_(position), q_(memory), sum_(memory + kTile) {}

  // Writes the mixture at the tokens [begin, end).
  void mix(std::int64_t begin, std::int64_t end, double* out) {
    begin_ = begin, end_ = end;
    const Row row = row_of(in_.public_logits, 0, position_);
    with_dtype(row.dtype, [&](auto tag) { load_public<decltype(tag)::value>(row); });
    double shared = 0.0;
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      const Row own = row_of(in_.private_logits, i, position_);
      with_dtype(own.dtype, [&](auto tag) { shared += add<decltype(tag)::value>(own, i); });
    }
    const double models = static_cast<double>(in_.shape.models);
    for (std::int64_t v = 0; v < end - begin; ++v) out[v] = (sum_[v] + shared * q_[v]) / models;
  }

 private:
  // Loads q. NaN becomes inf, so that a row which is not a distribution is noticed.
  template <Dtype D>
  void load_public(const Row& row) {
    const Vec lse(in_.public_lse[position_]);
    for (std::int64_t v = begin_; v < end_; v += Vec::kLanes) {
      exp_(load_logits<D>(row.data, v, end_) - lse).store(q_ + v - begin_);
      Vec(0.0).store(sum_ + v - begin_);
    }
  }

  // Adds one model's terms and returns its share of q.
  template <Dtype D>
  double add(const Row& row, std::int64_t model) {
    const std::int64_t at = model * in_.shape.positions + position_;
    const bool box = weights_.upper > 0.0;
    if (box && weights_.active != nullptr && !weights_.active[at]) return 1.0;
    if (!box && weights_.weight[at] == 0.0) return rest_of(weights_, at);
    // s p = e^{z - lse + log s}.
    const double lse = in_.private_lse[at];
    const double log_scale =
        box ? std::fmin(weights_.weight[at], kMostScale) : std::log(weights_.weight[at]);
    if (box) {
      const Vec lower(weights_.lower), upper(weights_.upper), residual(rest_of(weights_, at));
      const Vec least(least_clipped(lse));
      add_terms<D>(row, lse, log_scale, [&](Vec term, Vec z, Vec q) ADAPMIXED_INLINE {
        const Vec inside = vmin(upper * q, vmax(lower * q, term));
        return vselect(z < least, residual * q, inside);
      });
      return 0.0;
    }
    add_terms<D>(row, lse, log_scale, [](Vec term, Vec, Vec) ADAPMIXED_INLINE { return term; });
    return rest_of(weights_, at);
  }

  // Adds the terms e^{z - m}. A factor corrects the rounding of m; without it, sums under a box
  // would have an error in proportion to the row's log-sum-exp.
  template <Dtype D, class Clip>
  void add_terms(const Row& row, double lse, double log_scale, const Clip& clip) {
    const double m = lse - log_scale, lost = (lse - m) - log_scale;
    const ExpFrom from(m);
    const Vec origin(m), reach(600.0);
    const Vec far_unit(std::exp(-lost)), unit(std::exp(-lost - from.lost()));
    const auto step = [&](std::int64_t v, auto z) ADAPMIXED_INLINE {
      constexpr int kWays = decltype(z)::kSize;
      bool far = false;
      ADAPMIXED_UNROLL
      for (int k = 0; k < kWays; ++k) {
        z.v[k] = load_logits<D>(row.data, v + k * Vec::kLanes, end_);
        far = far || (vabs(z.v[k] - origin) > reach).any();
      }
      const auto near = from.exp(z);
      ADAPMIXED_UNROLL
      for (int k = 0; k < kWays; ++k) {
        double* sum = sum_ + v + k * Vec::kLanes - begin_;
        // Terms far from m, and masked ones, take the slower way.
        const Vec term = far && (vabs(z.v[k] - origin) > reach).any()
                             ? vselect(z.v[k] == z.v[k], far_unit * exp_(z.v[k] - origin), z.v[k])
                             : unit * near.v[k];
        const Vec q = Vec::load(q_ + v + k * Vec::kLanes - begin_);
        (Vec::load(sum) + clip(term, z.v[k], q)).store(sum);
      }
    };
    using Many = Several<Vec, 4>;
    std::int64_t v = begin_;
    for (; v + Many::kLanes <= end_; v += Many::kLanes) step(v, Many());
    for (; v < end_; v += Vec::kLanes) step(v, Several<Vec, 1>());
  }

  const Ensemble& in_;
  const Weights& weights_;
  std::int64_t position_, begin_ = 0, end_ = 0;
  double *q_, *sum_;
};

void mixture(const Ensemble& in, const Weights& weights, double* probabilities, int threads) {
  const std::int64_t vocab = in.shape.vocab, tiles = (vocab + kTile - 1) / kTile;
  cpu::parallel_for(in.shape.positions * tiles, 4, threads,
                    [&](std::int64_t first, std::int64_t last) {
                      double* memory = cpu::thread_scratch(Tile::kScratch);
                      for (std::int64_t task = first; task < last; ++task) {
                        const std::int64_t position = task / tiles, begin = task % tiles * kTile;
                        const std::int64_t end = begin + kTile < vocab ? begin + kTile : vocab;
                        Tile(in, weights, position, memory)
                            .mix(begin, end, probabilities + position * vocab + begin);
                      }
                    });
}

void log_prob(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
              double* result, int threads) {
  cpu::parallel_for(in.shape.positions, 16, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      // If every weight is 1, z has no part in the sum. But with NaN or +inf the public row is not
      // a distribution.
      const double z = row_of(in.public_logits, 0, b).at(targets[b]);
      double total = z < HUGE_VAL ? -HUGE_VAL : NAN;
      for (std::int64_t i = 0; i < in.shape.models; ++i) {
        total = log_add(total, log_projected(in, weights, i, b, targets[b]));
      }
      result[b] = total - std::log(static_cast<double>(in.shape.models));
    }
  });
}

}  // namespace

void add_mixture(cpu::Table& table) {
  table.mixture = mixture;
  table.log_prob = log_prob;
}

ADAPMIXED_CORE_END
