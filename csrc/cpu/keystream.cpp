// Consecutive ChaCha20 blocks as bytes: how the tests see what the other operations draw from.
#include <algorithm>

#include "cpu/chacha_blocks.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

void keystream(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first,
               std::int64_t count, std::uint8_t* result) {
  for (std::int64_t k = 0; k < count; k += kBlocks) {
    Wide words[16];
    chacha20_blocks(key, counter, first + static_cast<std::uint64_t>(k), words);
    const std::int64_t blocks = std::min<std::int64_t>(kBlocks, count - k);
    for (std::int64_t j = 0; j < blocks; ++j) {
      for (int i = 0; i < 64; ++i) {
        result[64 * (k + j) + i] = static_cast<std::uint8_t>(words[i / 4][j] >> (8 * (i % 4)));
      }
    }
  }
}

}  // namespace

void add_keystream(cpu::Table& table) { table.keystream = keystream; }
ADAPMIXED_CORE_END
