// Single log-probabilities of the mixture: one warp a position, whose lanes share the models.
#pragma once

#include "core/leave_one_out.h"
#include "core/log_pool.h"
#include "cuda/block.cuh"
#include "cuda/log_add.cuh"
#include "cuda/projected.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kLogProbWarps = 4;
// Beyond 0 and what rounding leaves there: the rows are not those of the log-sum-exps.
constexpr double kMostLogProb = 1e-6;

static __global__ void log_prob_kernel(Ensemble in, Weights weights, const std::int64_t* targets,
                                       double* result) {
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kLogProbWarps + warp_id();
  if (b >= in.shape.positions) return;  // the whole warp
  const std::int64_t v = targets[b];
  const bool inside = v >= 0 && v < in.shape.vocab;
  // What is not a number may have no part in the sum, but makes it NaN all the same.
  bool good =
      inside && std::isfinite(in.public_lse[b]) && row_of(in.public_logits, 0, b).at(v) < HUGE_VAL;
  double total[1] = {-HUGE_VAL};
  for (std::int64_t i = lane_id(); good && i < in.shape.models; i += kWarp) {
    good = admissible(in, weights, i * in.shape.positions + b);
    total[0] = LogAdd{}(total[0], log_projected(in, weights, i, b, v));
  }
  if (!good) total[0] = NAN;  // and so becomes every sum with it
  warp_reduce(total, LogAdd{});
  if (lane_id() != 0) return;
  const double found = total[0] - std::log(static_cast<double>(in.shape.models));
  result[b] = found <= kMostLogProb ? found : NAN;
}

// The same of a logarithmic pool.
static __global__ void pool_log_prob_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                            const __grid_constant__ LogPoolOptions options,
                                            const double* log_normaliser,
                                            const std::int64_t* targets, double* result) {
  const std::int64_t b = static_cast<std::int64_t>(blockIdx.x) * kLogProbWarps + warp_id();
  if (b >= in.shape.positions) return;  // the whole warp
  const std::int64_t v = targets[b];
  const bool inside = v >= 0 && v < in.shape.vocab;
  const double z0 = inside ? row_of(in.public_logits, 0, b).at(v) : NAN;
  double sum[1] = {0.0};
  if (z0 > -HUGE_VAL) {
    for (std::int64_t i = lane_id(); i < in.shape.models; i += kWarp) {
      const std::int64_t at = i * in.shape.positions + b;
      if (!takes_part(options, at)) continue;
      const bool good = std::fabs(in.private_lse[at]) < HUGE_VAL;
      sum[0] += good ? pooled_log_ratio(grid, in, i, b, v, z0) : NAN;
    }
  }
  warp_reduce(sum, Add{});
  if (lane_id() != 0) return;
  const double found = grid.log_weight(sum[0], z0 - in.public_lse[b]) - log_normaliser[b];
  result[b] = found <= kMostLogProb ? found : NAN;
}

ADAPMIXED_CORE_END
