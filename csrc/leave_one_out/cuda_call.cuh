// The arguments of the kernels of one leave-one-out call, and the division of the work.
//
// The vocabulary is cut into chunks of a whole number of tiles. One block takes a chunk and leaves
// its sums in the workspace; the sums are added in order. The number of chunks
// depends on V, N and K alone, so results are the same on every device and in every batch.
// Positions are queued in groups that share the workspace.
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
    group = std::clamp<std::int64_t>(kLossMemory / (chunks * per_chunk), 1, shape.positions);
  }

  // The sums take at most 64 MiB, or the sums of one chunk if those are larger.
  std::int64_t sums_bytes() const { return group * chunks * per_chunk * 8; }
};

// Those in double: (N, K, 2) sums, then (N) balances.
inline LossLayout double_layout(const Shape& shape, std::int64_t orders) {
  return {shape, kLossTile, shape.models * (2 * orders + 1), simulated_or(kMostLossChunks, 2)};
}

struct LossOrders {
  double value[kMaxOrders];
  int integer[kMaxOrders];  // 0 for an order that is not an integer
  int count;
  bool all_integer;
};

// What the blocks of a call tell each other about one position. All words begin as 0.
struct LossState {
  std::int32_t failed;      // floats do not serve here
  unsigned totalled;        // blocks of float_finish_kernel that are done
  std::int32_t foreign;     // the rows are invalid or not those of the projection
  std::int32_t overflowed;  // some sum left the range of double
  unsigned left_at;         // of the k-th position left to double_loss_kernel: its index
};
struct LossProgress {
  unsigned left;         // positions left to double_loss_kernel
  unsigned taken, done;  // its pieces of work
  unsigned unused;
};

struct LossCall {
  Ensemble in;
  Weights weights;
  Neighbours all;
  LossOrders orders;
  LossLayout layout;
  std::int64_t first;  // first position of this group
  double* sums;        // (group, chunks, per_chunk)
  LossProgress* progress;
  LossState* states;  // (group)
  double *loss, *balance;
  bool after_floats;  // only positions that these left are summed in double

  // The places of the sums of (model, order) and of the balance among the sums of one chunk.
  ADAPMIXED_HD std::int64_t sums_at(std::int64_t model, std::int64_t order) const {
    return 2 * (model * orders.count + order);
  }
  ADAPMIXED_HD std::int64_t balance_at(std::int64_t model) const {
    return 2 * in.shape.models * orders.count + model;
  }
  ADAPMIXED_HD double* loss_of(std::int64_t model, std::int64_t position) const {
    return loss + (model * in.shape.positions + position) * orders.count;
  }
};

// A chunk of the vocabulary at one position.
struct LossChunk {
  std::int64_t position, begin, end;
  double* sums;
};

__device__ inline LossChunk loss_chunk(const LossCall& call, std::int64_t member,
                                       std::int64_t chunk) {
  const std::int64_t begin = chunk * call.layout.chunk_length;
  const std::int64_t end = begin + call.layout.chunk_length;
  return {call.first + member, begin, end < call.in.shape.vocab ? end : call.in.shape.vocab,
          call.sums + (member * call.layout.chunks + chunk) * call.layout.per_chunk};
}

ADAPMIXED_CORE_END
