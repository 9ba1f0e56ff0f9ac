// Tokens from integer weights, bit for bit the CPU's: one block a position. Integers are added
// exactly, so that neither the total nor the token depends on who adds what.
#pragma once

#include "core/sampling.h"
#include "cuda/block.cuh"
#include "cuda/key.h"
#include "cuda/load.cuh"

ADAPMIXED_CORE_BEGIN

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
  const Prefix<uint128> prefix = block_prefix(weight);
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
