// Reads rows of logits for a block of threads. Neighbouring threads read neighbouring tokens, so
// rows need no alignment, and the order does not depend on it.
#pragma once

#include "common/runtime.cuh"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

template <Dtype D>
struct Bits {
  using type = std::uint16_t;
  static constexpr type kMasked = D == Dtype::bf16 ? 0xff80 : 0xfc00;  // -inf
};
template <>
struct Bits<Dtype::f32> {
  using type = std::uint32_t;
  static constexpr type kMasked = 0xff800000u;
};

template <Dtype D>
__device__ inline float float_of(typename Bits<D>::type bits) {
  if constexpr (D == Dtype::f32) {
    return bit_cast<float>(bits);
  } else if constexpr (D == Dtype::bf16) {
    return bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  } else {
    // Multiplying by 2^112 turns the exponent of a half into that of a float. Infinities and NaNs
    // get the largest exponent explicitly.
    const std::uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    const std::uint32_t exponent = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
    const auto wide = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
    return bit_cast<float>(wide | sign | exponent);
  }
}

// The first token of row (model, position); D is the dtype of the logits.
template <Dtype D>
__device__ inline const typename Bits<D>::type* row_bits(const Logits& logits, std::int64_t model,
                                                         std::int64_t position) {
  return reinterpret_cast<const typename Bits<D>::type*>(row_of(logits, model, position).data);
}

template <Dtype D>
__device__ inline float logit(const typename Bits<D>::type* row, std::int64_t v) {
  return float_of<D>(row[v]);
}

// Asks for the first words of an array, a line of 32 for each thread. Nothing waits for them.
__device__ inline void prefetch_words([[maybe_unused]] const std::uint32_t* words,
                                      [[maybe_unused]] std::int64_t count) {
#if !defined(ADAPMIXED_SIMT)
  const std::int64_t at = std::int64_t{threadIdx.x} * 32;
  if (at < count) asm volatile("prefetch.global.L1 [%0];" ::"l"(words + at));
#endif
}

// Calls visit(v, z) for every token of this thread. A few loads are on their way together.
template <Dtype D, class Visit>
__device__ void for_each_token(const typename Bits<D>::type* row, std::int64_t vocab,
                               const Visit& visit) {
  constexpr int kLoads = 4;
  const std::int64_t width = blockDim.x;
  for (std::int64_t v = threadIdx.x; v < vocab; v += kLoads * width) {
    typename Bits<D>::type bits[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      bits[k] = v + k * width < vocab ? row[v + k * width] : Bits<D>::kMasked;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (v + k * width < vocab) visit(v + k * width, float_of<D>(bits[k]));
    }
  }
}

ADAPMIXED_CORE_END
