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

constexpr int kMixtureThreads = 256;

// A thread takes one token, as in the kernel that wrote the probabilities and the sum of each of
// its blocks.
static __global__ void check_mixture_kernel(std::int64_t vocab, unsigned blocks_a_row,
                                            const double* block_sums, double* probabilities) {
  const std::int64_t position = blockIdx.x / blocks_a_row;
  const std::int64_t v = blockIdx.x % blocks_a_row * kMixtureThreads + threadIdx.x;
  double total = 0.0;
  for (unsigned k = threadIdx.x; k < blocks_a_row; k += kMixtureThreads) {
    total += block_sums[position * blocks_a_row + k];
  }
  total = block_sum(total);
  if (std::fabs(total - 1.0) <= kMixtureTolerance || v >= vocab) return;
  probabilities[position * vocab + v] = NAN;
}

ADAPMIXED_CORE_END
