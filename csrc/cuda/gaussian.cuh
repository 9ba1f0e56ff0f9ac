// Normal variates, bit for bit the CPU's: one thread a block of the stream, eight numbers each.
#pragma once

#include "core/chacha.h"
#include "core/normal.h"
#include "cuda/key.h"
#include "cuda/runtime.h"

ADAPMIXED_CORE_BEGIN

constexpr int kGaussianThreads = 128;

static __global__ void gaussian_kernel(Key key, std::uint64_t counter, double sigma,
                                       std::int64_t count, double* result) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kGaussianThreads + threadIdx.x;
  if (8 * index >= count) return;
  // The blocks of one lane, then those of the next.
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
