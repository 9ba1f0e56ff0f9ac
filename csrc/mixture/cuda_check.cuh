// What tells that rows are not those of the log-sum-exps, and how the log-probabilities are queued:
// shared by the mixture and the logarithmic pool.
#pragma once

#include "common/block.cuh"
#include "common/runtime.cuh"

ADAPMIXED_CORE_BEGIN

// Warps of a block: one a position.
constexpr int kLogProbWarps = 4;
// Beyond 0 and what rounding leaves there: the rows are not those of the log-sum-exps.
constexpr double kMostLogProb = 1e-6;
// A row that sums to 1 less well is not the mixture of these rows.
constexpr double kMixtureTolerance = 1e-6;

static __global__ void check_mixture_kernel(std::int64_t vocab, double* probabilities) {
  double* row = probabilities + blockIdx.x * vocab;
  double total = 0.0;
  for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) total += row[v];
  total = block_sum(total);
  if (std::fabs(total - 1.0) <= kMixtureTolerance) return;
  for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) row[v] = NAN;
}

ADAPMIXED_CORE_END
