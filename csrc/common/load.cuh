// The logits of rows, as a GPU's threads read them.
#pragma once

#include "common/runtime.cuh"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

template <Dtype D>
struct Bits {
  using type = std::uint16_t;
};
template <>
struct Bits<Dtype::f32> {
  using type = std::uint32_t;
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

ADAPMIXED_CORE_END
