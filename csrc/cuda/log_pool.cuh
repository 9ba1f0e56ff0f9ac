// The logarithmic pool (core/log_pool.h): a block a row finds its log-sum-exp and span, a thread a
// token adds up all models there, a block a position sums the weights. Sums of u_i are exact, the
// extremes of a span do not depend on their order, and the weights are added in a fixed one.
#pragma once

#include "core/log_pool.h"
#include "cuda/block.cuh"
#include "cuda/load.cuh"
#include "cuda/log_sum_exp.cuh"
#include "cuda/mixture.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kPoolThreads = 256;

// max u_i - min u_i of one row. Called by a whole block.
template <Dtype D>
__device__ double row_span(const PoolGrid& grid, const typename Bits<D>::type* row,
                           const typename Bits<D>::type* public_row, std::int64_t vocab,
                           double origin) {
  double extremes[2] = {-HUGE_VAL, -HUGE_VAL};  // of the positions and their negatives
  for_each_token<D>(row, 0, vocab, [&](std::int64_t v, float z) {
    const double z0 = logit<D>(public_row, v);
    if (z0 == -HUGE_VAL) return;
    const double x = grid.position(z - z0, origin);
    extremes[0] = vmax(x, extremes[0]);
    extremes[1] = vmax(-x, extremes[1]);
  });
  block_reduce(extremes, Max{});
  return grid.span(-extremes[1], extremes[0]);
}

template <Dtype D>
__global__ void pool_row_kernel(const __grid_constant__ StepInputs in, PoolGrid grid,
                                const __grid_constant__ LogPoolResults out) {
  const std::int64_t at = blockIdx.x, position = at % in.shape.positions;
  const auto* row = row_bits<D>(in.private_logits, at / in.shape.positions, position);
  const RowSum sum = row_sum<D>(row, in.shape.vocab);
  const double public_lse = out.public_lse[position];
  const bool public_ok = std::isfinite(public_lse);
  double span = NAN;
  if (sum.status == kRowOk && public_ok) {
    span = row_span<D>(grid, row, row_bits<D>(in.public_logits, 0, position), in.shape.vocab,
                       grid.origin(sum.lse, public_lse));
  }
  if (threadIdx.x != 0) return;
  out.span[at] = span;
  out.private_lse[at] = sum.lse;
  out.status[at] = public_ok ? sum.status : kRowPublic;
}

// sum_i u_i at one token, z0 its public logit; NaN where a row that counts has no distribution, or
// has what is no logit.
template <Dtype D>
__device__ double summed_log_ratio(const PoolGrid& grid, const Ensemble& in,
                                   const LogPoolOptions& options, std::int64_t position,
                                   std::int64_t v, double z0) {
  const double public_lse = in.public_lse[position];
  double sum = std::isfinite(public_lse) && z0 < HUGE_VAL ? 0.0 : NAN;
  if (z0 == -HUGE_VAL) return sum;
#pragma unroll 4
  for (std::int64_t i = 0; i < in.shape.models; ++i) {
    const std::int64_t at = i * in.shape.positions + position;
    if (!takes_part(options, at)) continue;
    const double private_lse = in.private_lse[at];
    const double z = logit<D>(row_bits<D>(in.private_logits, i, position), v);
    const double x = grid.clipped(grid.position(z - z0, grid.origin(private_lse, public_lse)));
    const bool good = std::fabs(private_lse) < HUGE_VAL && z < HUGE_VAL;
    sum += good ? grid.nats(x) : NAN;
  }
  return sum;
}

// A thread a token, blocks_a_row blocks a position.
template <Dtype D>
__global__ void pool_sum_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                const __grid_constant__ LogPoolOptions options,
                                std::int64_t blocks_a_row, double* sums) {
  const std::int64_t position = blockIdx.x / blocks_a_row;
  const std::int64_t v = blockIdx.x % blocks_a_row * kPoolThreads + threadIdx.x;
  if (v >= in.shape.vocab) return;
  const double z0 = logit<D>(row_bits<D>(in.public_logits, 0, position), v);
  sums[position * in.shape.vocab + v] = summed_log_ratio<D>(grid, in, options, position, v, z0);
}

// log sum_v q exp(share sum_i u_i), NaN where a term is.
template <Dtype D>
__global__ void pool_normaliser_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                       const double* sums, double* log_normaliser) {
  const std::int64_t position = blockIdx.x, vocab = in.shape.vocab;
  const auto* row = row_bits<D>(in.public_logits, 0, position);
  const double* sum = sums + position * vocab;
  const double lse = in.public_lse[position];
  double found[2] = {-HUGE_VAL, 0.0};  // the largest term; 1 where there is a NaN
  for_each_token<D>(row, 0, vocab, [&](std::int64_t v, float z0) {
    const double e = grid.log_weight(sum[v], z0 - lse);
    found[0] = vmax(e, found[0]);
    if (e != e) found[1] = 1.0;
  });
  block_reduce(found, Max{});
  double total = 0.0;
  for_each_token<D>(row, 0, vocab, [&](std::int64_t v, float z0) {
    total += exp_(grid.log_weight(sum[v], z0 - lse) - found[0]);
  });
  total = block_sum(total);
  if (threadIdx.x == 0) {
    log_normaliser[position] = found[1] == 0.0 ? found[0] + std::log(total) : NAN;
  }
}

template <Dtype D>
__global__ void pool_mixture_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                    const __grid_constant__ LogPoolOptions options,
                                    const double* log_normaliser, std::int64_t blocks_a_row,
                                    double* probabilities) {
  const std::int64_t position = blockIdx.x / blocks_a_row, vocab = in.shape.vocab;
  const std::int64_t v = blockIdx.x % blocks_a_row * kPoolThreads + threadIdx.x;
  if (v >= vocab) return;
  const double z0 = logit<D>(row_bits<D>(in.public_logits, 0, position), v);
  const double sum = summed_log_ratio<D>(grid, in, options, position, v, z0);
  const double log_p =
      grid.log_weight(sum, z0 - in.public_lse[position]) - log_normaliser[position];
  probabilities[position * vocab + v] = log_p == log_p ? exp_(log_p) : NAN;
}

ADAPMIXED_CORE_END
