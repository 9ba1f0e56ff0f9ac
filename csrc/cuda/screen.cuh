// Noisy screening of every position on the public top-k tokens: one block a position.
#pragma once

#include "core/screening.h"
#include "cuda/top_tokens.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kScreenThreads = 512;

// Up to so many tokens are kept in shared memory, a key and a number each; else in the workspace.
constexpr std::int64_t kMostShared = 2048;

__host__ __device__ inline std::int64_t bytes_kept(std::int64_t size) {
  return size * static_cast<std::int64_t>(sizeof(std::uint64_t) + sizeof(double));
}

// The sum of p_i - q over the models, in their order. Called by a whole warp.
__device__ inline double summed_difference(const Ensemble& in, const ScreenOptions& options,
                                           std::int64_t position, std::int64_t token, double q) {
  double difference = 0.0;
  for (std::int64_t first = 0; first < in.shape.models; first += kWarp) {
    const std::int64_t i = first + lane_id();
    const double own =
        i < in.shape.models ? screened_difference(in, options, i, position, token, q) : 0.0;
    for (int lane = 0; lane < kWarp; ++lane) difference += __shfl_sync(kAllLanes, own, lane);
  }
  return difference;
}

// D_alpha(s || q) of the tokens kept, +inf where a number is none. Called by a whole block.
__device__ inline double kept_divergence(const double* s, const std::uint64_t* keys,
                                         std::int64_t count, double lse, double order) {
  ScreeningSums sums(order);
  const auto log_q = [&](std::int64_t j) { return logit_of_key(keys[j]) - lse; };
  double totals[3] = {0.0, 0.0, 0.0};  // s, q, how many are NaN
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    totals[0] += ScreeningSums::nonnegative(s[j]);
    totals[1] += std::exp(log_q(j));
    if (s[j] != s[j]) totals[2] += 1.0;
  }
  block_sum(totals);
  if (totals[2] > 0.0 || !sums.set_totals(totals[0], totals[1])) return HUGE_VAL;
  double top = -HUGE_VAL;
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    top = std::fmax(top, sums.log_term(s[j], log_q(j)));
  }
  sums.set_top(block_max(top));
  double total = 0.0;
  for (std::int64_t j = threadIdx.x; j < count; j += blockDim.x) {
    total += sums.term(ScreeningSums::nonnegative(s[j]), log_q(j));
  }
  return sums.divergence(block_sum(total));
}

template <Dtype D>
__device__ double screened_divergence(const Ensemble& in, const ScreenOptions& options,
                                      std::int64_t position, std::uint64_t* keys, double* s) {
  const std::int64_t vocab = in.shape.vocab;
  const double lse = in.public_lse[position];
  const auto* row = row_bits<D>(in.public_logits, 0, position);
  double found[2] = {0.0, 0.0};  // tokens that are not masked, rows without a log-sum-exp
  for_each_token<D>(row, 0, vocab, [&](std::int64_t v, float z) {
    if (token_key(z, v) != kNoKey) found[0] += 1.0;
  });
  for (std::int64_t i = threadIdx.x; i < in.shape.models; i += blockDim.x) {
    const std::int64_t at = i * in.shape.positions + position;
    const bool active = options.active == nullptr || options.active[at];
    if (active && !std::isfinite(in.private_lse[at])) found[1] += 1.0;
  }
  block_sum(found);
  if (!std::isfinite(lse) || found[1] > 0.0) return HUGE_VAL;
  const auto present = static_cast<std::int64_t>(found[0]);
  const std::int64_t count = options.top_k < present ? options.top_k : present;
  if (count <= 0) return HUGE_VAL;
  top_keys<D>(row, vocab, present, count, keys);
  for (std::int64_t j = warp_id(); j < count; j += warp_count()) {
    const double q = std::exp(logit_of_key(keys[j]) - lse);
    const double difference = summed_difference(in, options, position, token_of_key(keys[j]), q);
    if (lane_id() == 0) {
      s[j] = screened(options, q, difference, options.noise[position * options.top_k + j]);
    }
  }
  __syncthreads();
  return kept_divergence(s, keys, count, lse, options.order);
}

// `size`: sort_size of the most tokens that any position keeps.
template <Dtype D>
__global__ void __launch_bounds__(kScreenThreads, 1)
    screen_kernel(Ensemble in, ScreenOptions options, std::int64_t size, char* workspace,
                  double* divergence, bool* passed) {
  const std::int64_t b = blockIdx.x;
  char* memory = size <= kMostShared ? dynamic_shared<char>() : workspace + b * bytes_kept(size);
  auto* keys = reinterpret_cast<std::uint64_t*>(memory);
  const double result =
      screened_divergence<D>(in, options, b, keys, reinterpret_cast<double*>(keys + size));
  if (threadIdx.x == 0) {
    divergence[b] = result;
    passed[b] = result <= options.threshold;
  }
}

ADAPMIXED_CORE_END
