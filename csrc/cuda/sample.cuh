// Tokens drawn exactly in proportion to their probabilities, bit for bit the CPU's: one block a
// position. Integers are added exactly, so that neither the total nor the token depends on who adds
// what.
#pragma once

#include "core/sampling.h"
#include "cuda/block.cuh"
#include "cuda/key.h"
#include "cuda/load.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kSampleThreads = 512;

template <Dtype D>
__global__ void __launch_bounds__(kSampleThreads, 2)
    sample_kernel(const double* probabilities, Logits public_logits, std::int64_t vocab, Key key,
                  std::uint64_t counter, std::int64_t* tokens, std::int32_t* status) {
  const std::int64_t b = blockIdx.x;
  const double* p = probabilities + b * vocab;
  const auto* row = row_bits<D>(public_logits, 0, b);
  const std::int64_t length = (vocab + kSampleThreads - 1) / kSampleThreads;
  const std::int64_t begin = length * threadIdx.x;
  const std::int64_t end = begin + length < vocab ? begin + length : vocab;
  double p_sum = 0.0, invalid = 0.0, present = 0.0;
  uint128 weight = 0;
  for (std::int64_t v = begin; v < end; ++v) {
    const double x = p[v];
    const bool supported = logit<D>(row, v) > -HUGE_VAL;
    p_sum += x;
    if (supported) present = 1.0;
    if (!is_probability(x)) {
      invalid = 1.0;
    } else if (supported) {
      weight += integer_weight(x);
    }
  }
  invalid = block_max(invalid);
  present = block_max(present);
  p_sum = block_sum(p_sum);
  const Prefix<uint128> prefix = block_prefix(weight);
  std::int32_t found = kSampled;
  if (invalid != 0.0 || !is_total(p_sum)) {
    found = kNoDistribution;
  } else if (present == 0.0) {
    found = kNoSupport;
  } else if (prefix.total < least_total(vocab)) {
    found = kNoMass;
  }
  if (threadIdx.x == 0) {
    status[b] = found;
    tokens[b] = -1;
  }
  if (found != kSampled) return;
  // Every thread draws the same numbers; the one whose stretch holds one looks for the token, the
  // first where it lies at or beyond the end.
  __shared__ std::int64_t answer;
  __shared__ std::uint64_t limbs[ExactDraw::kLimbs];
  const auto probability = [&](std::int64_t v) {
    return drawn_probability(p[v], logit<D>(row, v) > -HUGE_VAL);
  };
  const Stream stream{key.bytes(), counter, static_cast<std::uint32_t>(b)};
  const Draws draws(prefix.total);
  for (std::uint32_t number = 0;; ++number) {
    const uint128 draw = draws(stream, number);
    if (draw >= prefix.total + static_cast<uint128>(vocab)) continue;
    const bool inside = draw < prefix.total;
    if (inside ? draw >= prefix.before && draw - prefix.before < weight : threadIdx.x == 0) {
      std::int64_t token = -1;
      if (inside) token = token_by_weights(draw - prefix.before, begin, probability);
      if (token < 0) {
        token = exact_token(ExactDraw(draw, stream, number, limbs), vocab, probability);
      }
      answer = token;
    }
    __syncthreads();
    const std::int64_t token = answer;
    __syncthreads();
    if (token < 0) continue;
    if (threadIdx.x == 0) tokens[b] = token;
    return;
  }
}

ADAPMIXED_CORE_END
