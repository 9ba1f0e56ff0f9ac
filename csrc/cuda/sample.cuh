// Tokens from integer weights, bit for bit the CPU's: one block a position. Integers are added
// exactly, so that neither the total nor the token depends on who adds what.
#pragma once

#include "core/sampling.h"
#include "cuda/block.cuh"
#include "cuda/key.h"
#include "cuda/load.cuh"

ADAPMIXED_CORE_BEGIN

// The values of the threads before this one, added, and those of the whole block.
struct BlockPrefix {
  uint128 before, total;
};

// Called by a whole block, once in a kernel: what is shared here is not read to the end by all when
// it returns, so that a second call would need a barrier before it.
__device__ inline BlockPrefix block_prefix(uint128 value) {
  __shared__ std::uint64_t high[kMaxWarps], low[kMaxWarps];
  uint128 sum = value;  // of this lane and those before it
  for (int step = 1; step < kWarp; step *= 2) {
    const std::uint64_t h = __shfl_up_sync(kAllLanes, static_cast<std::uint64_t>(sum >> 64), step);
    const std::uint64_t l = __shfl_up_sync(kAllLanes, static_cast<std::uint64_t>(sum), step);
    if (lane_id() >= step) sum += static_cast<uint128>(h) << 64 | l;
  }
  if (lane_id() == kWarp - 1) {
    high[warp_id()] = static_cast<std::uint64_t>(sum >> 64);
    low[warp_id()] = static_cast<std::uint64_t>(sum);
  }
  __syncthreads();
  BlockPrefix prefix{sum - value, 0};
  for (int w = 0; w < warp_count(); ++w) {
    const uint128 warp = static_cast<uint128>(high[w]) << 64 | low[w];
    if (w < warp_id()) prefix.before += warp;
    prefix.total += warp;
  }
  return prefix;
}

constexpr int kSampleThreads = 512;

template <Dtype D>
__global__ void __launch_bounds__(kSampleThreads, 1)
    sample_kernel(const double* probabilities, Logits public_logits, std::int64_t vocab, Key key,
                  std::uint64_t counter, std::int64_t* tokens, std::int32_t* status) {
  const std::int64_t b = blockIdx.x;
  const double* p = probabilities + b * vocab;
  const auto* row = row_bits<D>(public_logits, 0, b);
  const std::int64_t length = (vocab + kSampleThreads - 1) / kSampleThreads;
  const std::int64_t begin = length * threadIdx.x;
  const std::int64_t end = begin + length < vocab ? begin + length : vocab;
  double p_sum = 0.0, invalid = 0.0;
  uint128 weight = 0;
  for (std::int64_t v = begin; v < end; ++v) {
    const double x = p[v];
    p_sum += x;
    if (is_probability(x)) {
      weight += integer_weight(x, logit<D>(row, v) > -HUGE_VAL);
    } else {
      invalid = 1.0;
    }
  }
  invalid = block_max(invalid);
  p_sum = block_sum(p_sum);
  const BlockPrefix prefix = block_prefix(weight);
  std::int32_t found = 0;
  if (invalid != 0.0 || !is_total(p_sum)) {
    found = 1;
  } else if (prefix.total == 0) {
    found = 2;
  }
  if (threadIdx.x == 0) {
    status[b] = found;
    if (found != 0) tokens[b] = -1;
  }
  if (found != 0) return;
  // Every thread draws the same number; the one whose stretch holds it looks for the token.
  const Stream stream{key.bytes(), counter, static_cast<std::uint32_t>(b)};
  uint128 draw = uniform_below(stream, prefix.total);
  if (draw < prefix.before || draw - prefix.before >= weight) return;
  draw -= prefix.before;
  for (std::int64_t v = begin;; ++v) {
    const uint128 w = integer_weight(p[v], logit<D>(row, v) > -HUGE_VAL);
    if (draw < w) {
      tokens[b] = v;
      return;
    }
    draw -= w;
  }
}

ADAPMIXED_CORE_END
