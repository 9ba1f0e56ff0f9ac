// The losses of every model at one position in double, for every input. The formulas are those of
// leave_one_out/formula.h. The vocabulary is cut into a fixed number of chunks whose sums are added
// in order, so the result does not depend on the number of threads.
#pragma once

#include "leave_one_out/rare.h"

#include "common/parallel.h"
#include "common/rows.h"
#include "leave_one_out/cpu_exact_tile.h"
#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr std::int64_t kChunks = 32;

// One chunk of one position, tile by tile and model by model.
class ExactChunk {
 public:
  ExactChunk(const Ensemble& in, const Weights& weights, const LeaveOneOutOptions& options,
             std::int64_t position, double* memory)
      : in_(in),
        weights_(weights),
        options_(options),
        position_(position),
        all_(neighbours_of(in.shape, options)),
        tile_(in, weights, position, memory) {
    columns_ = memory + MixtureTile::scratch_size(in.shape.models);
    for (std::int64_t k = 0; k < options.num_orders; ++k) {
      integers_[k] = integer_order(options.orders[k]);
      all_integer_ = all_integer_ && integers_[k] != 0;
    }
  }

  static std::int64_t scratch_size(std::int64_t models) {
    return MixtureTile::scratch_size(models) + kColumns * MixtureTile::tile_width(models);
  }

  // Adds to sums: (N, K, 2), and to balance: (N), sum_v q delta_i. The balance is 0 if the rows
  // belong to the log-sum-exps. Any other value, or NaN, reveals a projection of other logits.
  void add(std::int64_t begin, std::int64_t end, double* sums, double* balance) {
    for (std::int64_t v = begin; v < end; v += tile_.width()) {
      const std::int64_t stop = v + tile_.width() < end ? v + tile_.width() : end;
      tile_.load(v, stop);
      prepare(v, stop - v);
      for (std::int64_t i = 0; i < in_.shape.models; ++i) {
        add_model(i, stop - v, sums + 2 * i * options_.num_orders, balance + i);
      }
      for (std::int64_t k = 0; k < tile_.wild_count(); ++k) {
        add_wild(tile_.wild(k), sums, balance);
      }
    }
  }

 private:
  // Columns that the models of one tile share, with one number per token.
  static constexpr std::int64_t kColumns = 5;
  double* column(int index, std::int64_t lane) { return columns_ + index * tile_.width() + lane; }
  double* p(std::int64_t lane) { return column(0, lane); }            // the mixture
  double* total(std::int64_t lane) { return column(1, lane); }        // N p / q
  double* mean_excess(std::int64_t lane) { return column(2, lane); }  // p / q - 1
  double* mean_ratio(std::int64_t lane) { return column(3, lane); }   // p / q
  double* scale(std::int64_t lane) { return column(4, lane); }        // x per unit of difference

  void prepare(std::int64_t v, std::int64_t length) {
    for (std::int64_t lane = 0; lane < length; lane += Vec::kLanes) {
      const Projected<Vec> mean = with_absent(all_, tile_.mean(lane));
      Mask rare;
      const MixtureToken<Vec> token = mixture_token(all_, tile_.q(lane), mean, rare);
      for (int l = 0; rare.any() && l < Vec::kLanes; ++l) {
        if (rare.bits() >> l & 1u) tile_.add_wild(v + lane + l);
      }
      token.p.store(p(lane));
      token.total.store(total(lane));
      token.mean.excess.store(mean_excess(lane));
      token.mean.ratio.store(mean_ratio(lane));
      token.scale.store(scale(lane));
    }
  }

  void add_model(std::int64_t i, std::int64_t length, double* out, double* balance) {
    Vec gained(0.0);
    Vec forward[kMaxOrders], reverse[kMaxOrders];
    for (std::int64_t k = 0; k < options_.num_orders; ++k) forward[k] = reverse[k] = Vec(0.0);
    for (std::int64_t lane = 0; lane < length; lane += Vec::kLanes) {
      const Projected<Vec> own{tile_.excess(i, lane), tile_.ratio(i, lane)};
      gained = vfma(tile_.q(lane), own.excess, gained);
      const MixtureToken<Vec> shared{Vec::load(p(lane)),
                                     Vec::load(total(lane)),
                                     {Vec::load(mean_excess(lane)), Vec::load(mean_ratio(lane))},
                                     Vec::load(scale(lane))};
      Mask dominated;
      NeighbourToken<Vec> neighbour = neighbour_token(all_, shared, own, dominated);
      if (dominated.any()) {
        neighbour.X =
            vselect(dominated, ratio_from_rest(all_, rest(i, lane), shared.total), neighbour.X);
      }
      const ExcessToken<Vec> token = excess_token(neighbour);
      LogParts<Vec> log{};
      if (!all_integer_) log = log_parts(token.x, token.X);
      for (std::int64_t k = 0; k < options_.num_orders; ++k) {
        if (const int n = integers_[k]) {
          add_excess(token, n, forward[k], reverse[k]);
        } else {
          add_excess(token, log, options_.orders[k], forward[k], reverse[k]);
        }
      }
    }
    for (std::int64_t k = 0; k < options_.num_orders; ++k) {
      out[2 * k] += sum(forward[k]);
      out[2 * k + 1] += sum(reverse[k]);
    }
    *balance += sum(gained);
  }

  // The sum of the other models' p_bar / q.
  Vec rest(std::int64_t i, std::int64_t lane) const {
    Vec sum(all_.absent);
    for (std::int64_t j = 0; j < in_.shape.models; ++j) {
      if (j != i) sum = sum + tile_.ratio(j, lane);
    }
    return sum;
  }

  void add_wild(std::int64_t v, double* sums, double* balance) {
    // The lanes have already balanced a token whose mixture alone is rare.
    const double log_q = row_of(in_.public_logits, 0, position_).at(v) - in_.public_lse[position_];
    for (std::int64_t i = 0; i < in_.shape.models && log_q < kWildLogQ; ++i) {
      balance[i] += rare_gain(in_, weights_, i, position_, v);
    }
    const RareToken token(in_, weights_, position_, v, all_);
    if (token.negligible()) return;
    for (std::int64_t i = 0; i < in_.shape.models; ++i) {
      const double log_other = token.log_neighbour(i);
      for (std::int64_t k = 0; k < options_.num_orders; ++k) {
        double* out = sums + 2 * (i * options_.num_orders + k);
        token.add(log_other, options_.orders[k], out[0], out[1]);
      }
    }
  }

  const Ensemble& in_;
  const Weights& weights_;
  const LeaveOneOutOptions& options_;
  std::int64_t position_;
  Neighbours all_;
  MixtureTile tile_;
  double* columns_;
  int integers_[kMaxOrders];  // the orders, 0 for one that is not an integer
  bool all_integer_ = true;
};

// Computes sums that left the range of double again in the log domain: a divergence of 42 nats at
// order 18 is finite. An infinite divergence stays infinite.
inline void resolve_overflow(const Ensemble& in, const Weights& weights,
                             const LeaveOneOutOptions& options, double* loss) {
  const std::int64_t models = in.shape.models, orders = options.num_orders;
  bool any = false;
  for (std::int64_t k = 0; k < models * orders; ++k) any = any || loss[k] == HUGE_VAL;
  if (!any) return;
  const Neighbours all = neighbours_of(in.shape, options);
  cpu::Buffer logs(2 * models * orders);
  for (std::int64_t k = 0; k < 2 * models * orders; ++k) logs.data()[k] = -HUGE_VAL;
  for (std::int64_t v = 0; v < in.shape.vocab; ++v) {
    const RareToken token(in, weights, 0, v, all);
    for (std::int64_t i = 0; i < models; ++i) {
      const double log_other = token.log_neighbour(i);
      for (std::int64_t k = 0; k < orders; ++k) {
        double* out = logs.data() + 2 * (i * orders + k);
        token.add_log(log_other, options.orders[k], out[0], out[1]);
      }
    }
  }
  for (std::int64_t k = 0; k < models * orders; ++k) {
    if (loss[k] != HUGE_VAL) continue;
    const double* out = logs.data() + 2 * k;
    loss[k] = divergence_from_logs(out[0], out[1], options.orders[k % orders]);
  }
}

// in: an ensemble of one position. loss: (N, K), balance: (N), as in common/operators.h.
inline void exact_leave_one_out(const Ensemble& in, const Weights& weights,
                                const LeaveOneOutOptions& options, double* loss, double* balance,
                                int threads) {
  const std::int64_t models = in.shape.models, vocab = in.shape.vocab;
  const std::int64_t orders = options.num_orders;
  const std::int64_t per_chunk = models * (2 * orders + 1);  // sums, then balances
  const std::int64_t length = round_up((vocab + kChunks - 1) / kChunks, 8);
  const std::int64_t chunks = (vocab + length - 1) / length;
  cpu::Buffer partial(chunks * per_chunk);
  cpu::parallel_for(chunks, 1, threads, [&](std::int64_t begin, std::int64_t end) {
    double* memory = cpu::thread_scratch(ExactChunk::scratch_size(models));
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      double* sums = partial.data() + chunk * per_chunk;
      for (std::int64_t k = 0; k < per_chunk; ++k) sums[k] = 0.0;
      const std::int64_t start = chunk * length;
      const std::int64_t stop = start + length < vocab ? start + length : vocab;
      ExactChunk(in, weights, options, 0, memory)
          .add(start, stop, sums, sums + 2 * models * orders);
    }
  });
  for (std::int64_t i = 0; i < models; ++i) {
    const auto total = [&](std::int64_t at) {
      double s = 0.0;
      for (std::int64_t c = 0; c < chunks; ++c) s += partial.data()[c * per_chunk + at];
      return s;
    };
    balance[i] = total(2 * models * orders + i);
    for (std::int64_t k = 0; k < orders; ++k) {
      const std::int64_t at = i * orders + k;
      loss[at] = divergence_from_excess(total(2 * at), total(2 * at + 1), options.orders[k]);
    }
  }
  resolve_overflow(in, weights, options, loss);
}

ADAPMIXED_CORE_END
