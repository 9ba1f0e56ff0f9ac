// Single log-probabilities of the mixture: one warp a position, whose lanes share the models.
#pragma once

#include "core/leave_one_out.h"
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

ADAPMIXED_CORE_END
