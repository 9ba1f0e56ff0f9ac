// Tokens drawn exactly in proportion to their probabilities, and normal variates, both bit for bit
// as on the CPU. Tokens: one block per position. Integers are added exactly, so the total and the
// token do not depend on the order. Normal variates: one thread per block of the stream, eight
// numbers each.
#include <cstdint>
#include <cstring>

#include "common/block.cuh"
#include "common/config.h"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "common/runtime.cuh"
#include "sample/chacha.h"
#include "sample/formula.h"
#include "sample/normal.h"

ADAPMIXED_CORE_BEGIN

// The generator's key, as an argument of a kernel.
struct Key {
  std::uint32_t words[8];

  ADAPMIXED_HD const std::uint8_t* bytes() const {
    return reinterpret_cast<const std::uint8_t*>(words);
  }
};

// `bytes`: 32 bytes in host memory.
inline Key key_of(const std::uint8_t* bytes) {
  Key key;
  std::memcpy(key.words, bytes, sizeof key.words);
  return key;
}

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
  // Every thread draws the same numbers. The thread whose stretch holds the draw looks for the
  // token; the first thread does so if the draw lies at or beyond the total.
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

constexpr int kGaussianThreads = 128;

static __global__ void gaussian_kernel(Key key, std::uint64_t counter, double sigma,
                                       std::int64_t count, double* result) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kGaussianThreads + threadIdx.x;
  if (8 * index >= count) return;
  // First the blocks of one lane, then those of the next.
  const Stream stream{key.bytes(), counter, static_cast<std::uint32_t>(index >> 32)};
  std::uint64_t words[8];
  stream.block(static_cast<std::uint32_t>(index), words);
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const NormalPair<double> pair = normal_pair(words[i], words[i + 1]);
    const std::int64_t at = 8 * index + i;
    if (at < count) result[at] = sigma * pair.first;
    if (at + 1 < count) result[at + 1] = sigma * pair.second;
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

void sample(const double* probabilities, const Logits& public_logits, std::int64_t positions,
            std::int64_t vocab, const std::uint8_t* key, std::uint64_t counter,
            std::int64_t* tokens, std::int32_t* status, const Queue& queue) {
  const DeviceGuard guard(queue);
  with_dtype(public_logits.dtype, [&](auto dtype) {
    launch(queue, device::sample_kernel<decltype(dtype)::value>, grid_of(positions),
           dim3(device::kSampleThreads), 0, probabilities, public_logits, vocab,
           device::key_of(key), counter, tokens, status);
  });
}

void gaussian(const std::uint8_t* key, std::uint64_t counter, double sigma, std::int64_t count,
              double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t per_block = 8 * device::kGaussianThreads;
  launch(queue, device::gaussian_kernel, grid_of((count + per_block - 1) / per_block),
         dim3(device::kGaussianThreads), 0, device::key_of(key), counter, sigma, count, result);
}

}  // namespace adapmixed::cuda
