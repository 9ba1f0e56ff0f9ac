// p = mean_i p_bar_i: a thread per token; then a block per position looks at the sum, since rows
// that do not belong to the projection cannot be refused here.
#pragma once

#include "core/leave_one_out.h"
#include "cuda/block.cuh"
#include "cuda/projected.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kMixtureThreads = 256;
// A row that sums to 1 less well is not the mixture of these rows.
constexpr double kMixtureTolerance = 1e-6;

template <Dtype D>
__global__ void mixture_kernel(const __grid_constant__ Ensemble in,
                               const __grid_constant__ Weights weights, std::int64_t blocks_a_row,
                               double* probabilities) {
  const std::int64_t position = blockIdx.x / blocks_a_row;
  const std::int64_t v = blockIdx.x % blocks_a_row * kMixtureThreads + threadIdx.x;
  if (v >= in.shape.vocab) return;
  const double z0 = logit<D>(row_bits<D>(in.public_logits, 0, position), v);
  const double lq = z0 - in.public_lse[position];
  double p = 0.0;
  if (lq < kWildLogQ) {
    p = rare_mean(in, weights, position, v);
  } else {
    p = tame_probability(lq) * mean_projected<D>(in, weights, position, v, z0).ratio;
  }
  probabilities[position * in.shape.vocab + v] = p;
}

static __global__ void check_mixture_kernel(std::int64_t vocab, double* probabilities) {
  double* row = probabilities + blockIdx.x * vocab;
  double total = 0.0;
  for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) total += row[v];
  total = block_sum(total);
  if (std::fabs(total - 1.0) <= kMixtureTolerance) return;
  for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) row[v] = NAN;
}

ADAPMIXED_CORE_END
