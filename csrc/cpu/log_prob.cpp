// Single log-probabilities of the mixture: scalar work per position.
#include "core/leave_one_out.h"
#include "core/log_pool.h"
#include "cpu/parallel.h"

namespace adapmixed::cpu {

namespace core = adapmixed::ADAPMIXED_ISA;

void log_prob(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
              double* result, int threads) {
  parallel_for(in.shape.positions, 16, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      // Not needed where every weight is 1, but a public row without it would be no distribution.
      const double z = core::row_of(in.public_logits, 0, b).at(targets[b]);
      double total = z < HUGE_VAL ? -HUGE_VAL : NAN;
      for (std::int64_t i = 0; i < in.shape.models; ++i) {
        total = core::log_add(total, core::log_projected(in, weights, i, b, targets[b]));
      }
      result[b] = total - std::log(static_cast<double>(in.shape.models));
    }
  });
}

void pool_log_prob(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                   const std::int64_t* targets, double* result, int threads) {
  const core::PoolGrid grid(options);
  parallel_for(in.shape.positions, 16, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const double z0 = core::row_of(in.public_logits, 0, b).at(targets[b]);
      double sum = 0.0;
      if (z0 > -HUGE_VAL) {
        for (std::int64_t i = 0; i < in.shape.models; ++i) {
          if (!core::takes_part(options, i * in.shape.positions + b)) continue;
          sum += core::pooled_log_ratio(grid, in, i, b, targets[b], z0);
        }
      }
      result[b] = grid.log_weight(sum, z0 - in.public_lse[b]) - log_normaliser[b];
    }
  });
}

}  // namespace adapmixed::cpu
