// How one kind of sums of a leave-one-out call divides the vocabulary.
//
// The vocabulary is cut into chunks of a whole number of tiles. One block takes a chunk and leaves
// its sums in the workspace; the sums are added in order. The number of chunks depends on V, N and
// K alone, so results are the same on every device and in every batch. Positions are queued in
// groups that share the workspace.
#pragma once

#include <algorithm>

#include "common/runtime.cuh"
#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr int kLossThreads = 128;
constexpr int kLossTile = kLossThreads;  // tokens: one per thread in the work that models share
constexpr int kTileWords = kLossTile / 32;
constexpr std::int64_t kMostLossBlocks = 512;  // they share the work of double_loss_kernel
constexpr std::int64_t kMostLossChunks = 512;
constexpr std::int64_t kLossMemory = std::int64_t{1} << 23;  // doubles: 64 MiB

// How one kind of sums divides the vocabulary.
struct LossLayout {
  std::int64_t tile = 0, per_chunk = 0;       // tokens, doubles
  std::int64_t chunk_length = 0, chunks = 0;  // whole tiles
  std::int64_t group = 0;                     // positions that fit the workspace

  LossLayout() = default;
  LossLayout(const Shape& shape, std::int64_t tile_, std::int64_t per_chunk_, std::int64_t most)
      : tile(tile_), per_chunk(per_chunk_) {
    const std::int64_t fit = std::min(kLossMemory / per_chunk, most);
    const std::int64_t tiles = (shape.vocab + tile - 1) / tile;
    const std::int64_t tiles_a_chunk = fit < 1 ? tiles : (tiles + fit - 1) / fit;
    chunk_length = tiles_a_chunk * tile;
    chunks = (tiles + tiles_a_chunk - 1) / tiles_a_chunk;
    const std::int64_t rows = std::max<std::int64_t>(kLossMemory / (chunks * per_chunk), 1);
    group = std::min(rows, shape.positions);  // there may be none
  }

  // The sums take at most 64 MiB, or the sums of one chunk if those are larger.
  std::int64_t sums_bytes() const { return group * chunks * per_chunk * 8; }
};

// Those in double: (N, K, 2) sums, (N) balances, then the mass of q.
inline LossLayout double_layout(const Shape& shape, std::int64_t orders) {
  return {shape, kLossTile, shape.models * (2 * orders + 1) + 1, simulated_or(kMostLossChunks, 2)};
}

ADAPMIXED_CORE_END
