// Checks that rows belong to the log-sum-exps, and the block size of the log_prob kernels. Shared
// by the mixture and the logarithmic pool.
#pragma once

#include "common/block.cuh"
#include "common/runtime.cuh"

ADAPMIXED_CORE_BEGIN

// Warps in a block; each takes one position.
constexpr int kLogProbWarps = 4;
// The largest log-probability that rounding explains. A larger one shows that the rows do not
// belong to the log-sum-exps.
constexpr double kMostLogProb = 1e-6;
// A row whose sum is further from 1 is not the mixture of these rows.
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
