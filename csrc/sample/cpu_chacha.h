// Several consecutive ChaCha20 blocks at once: every state word is a vector over the blocks.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/config.h"
#include "sample/chacha.h"

ADAPMIXED_CORE_BEGIN

#if defined(__AVX512F__)
constexpr int kBlocks = 16;
#elif defined(__AVX2__)
constexpr int kBlocks = 8;
#else
constexpr int kBlocks = 4;  // every 64-bit processor has 128-bit registers
#endif

// The vector extension of g++ and clang: +, ^, << and >> act on each lane.
typedef std::uint32_t Wide __attribute__((vector_size(4 * kBlocks)));

// Computes words 0 to 15 of the blocks first .. first + kBlocks - 1 of one call. The upper half of
// the index is the lane, so a group may cross from one lane into the next.
inline void chacha20_blocks(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first,
                            Wide* out) {
  std::uint32_t same[16];
  chacha20_key_words(key, same);
  same[13] = static_cast<std::uint32_t>(counter);
  same[14] = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t block[kBlocks], lane[kBlocks];
  for (int j = 0; j < kBlocks; ++j) {
    const std::uint64_t index = first + static_cast<std::uint64_t>(j);
    block[j] = static_cast<std::uint32_t>(index);
    lane[j] = static_cast<std::uint32_t>(index >> 32);
  }
  Wide blocks, lanes;
  std::memcpy(&blocks, block, sizeof blocks);
  std::memcpy(&lanes, lane, sizeof lanes);
  for (int i = 0; i < 15; ++i) out[i] = Wide{} + same[i];
  out[12] = blocks;
  out[15] = lanes;
  chacha20_rounds(out);
  for (int i = 0; i < 15; ++i) {
    if (i != 12) out[i] += same[i];
  }
  out[12] += blocks;
  out[15] += lanes;
}

ADAPMIXED_CORE_END
