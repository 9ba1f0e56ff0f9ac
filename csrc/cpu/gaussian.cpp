// Normal variates, several blocks of the stream at a time.
#include <algorithm>

#include "core/normal.h"
#include "cpu/chacha_blocks.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/table.h"

ADAPMIXED_CORE_BEGIN
namespace {

constexpr std::int64_t kGroup = 8 * kBlocks;  // numbers from one group of blocks

// The upper 53 bits of one 64-bit word of every block.
struct UpperBits {
  alignas(64) std::uint32_t low[kBlocks], high[kBlocks];

  explicit UpperBits(const Wide* words) {
    const Wide shifted = words[0] >> 11;
    std::memcpy(low, &shifted, sizeof shifted);
    std::memcpy(high, words + 1, sizeof shifted);
  }
  Vec load(int block) const {
    return vfma(load_u32(high + block), Vec(0x1p21), load_u32(low + block));  // exact
  }
};

// The first `count` <= kGroup numbers from block `first` on.
void one_group(const std::uint8_t* key, std::uint64_t counter, std::uint64_t first, double sigma,
               std::int64_t count, double* result) {
  Wide words[16];
  chacha20_blocks(key, counter, first, words);
  const int blocks = static_cast<int>((count + 7) / 8);
  alignas(64) double normals[8][kBlocks];
  for (int i = 0; i < 8; i += 2) {
    const UpperBits a(words + 2 * i), b(words + 2 * i + 2);
    for (int j = 0; j < blocks; j += Vec::kLanes) {
      const NormalPair<Vec> pair = box_muller(a.load(j), b.load(j));
      (Vec(sigma) * pair.first).store(normals[i] + j);
      (Vec(sigma) * pair.second).store(normals[i + 1] + j);
    }
  }
  if (count == kGroup) {
    for (int j = 0; j < kBlocks; ++j) {
      for (int i = 0; i < 8; ++i) result[8 * j + i] = normals[i][j];
    }
  } else {
    for (std::int64_t k = 0; k < count; ++k) result[k] = normals[k % 8][k / 8];
  }
}

void gaussian(const std::uint8_t* key, std::uint64_t counter, double sigma, std::int64_t count,
              double* result, int threads) {
  const std::int64_t groups = (count + kGroup - 1) / kGroup;
  // Fewer numbers than these are not worth waking a thread for.
  const std::int64_t grain = 8192 / kGroup;
  cpu::parallel_for(groups, grain, threads, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t g = begin; g < end; ++g) {
      one_group(key, counter, static_cast<std::uint64_t>(g * kBlocks), sigma,
                std::min(kGroup, count - g * kGroup), result + g * kGroup);
    }
  });
}

}  // namespace

void add_gaussian(cpu::Table& table) { table.gaussian = gaussian; }
ADAPMIXED_CORE_END
