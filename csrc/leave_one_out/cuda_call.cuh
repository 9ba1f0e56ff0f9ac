// The arguments of the kernels of one leave-one-out call, and the division of the work.
//
// The vocabulary is cut into chunks of a whole number of tiles. Each chunk is the work of one
// block, which leaves its sums in the workspace; the sums are added in order. The number of chunks
// depends on V, N and K alone, so results are the same on every device and in every batch.
// Positions are queued in groups that share the workspace.
#pragma once

#include "common/runtime.cuh"
#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr int kLossThreads = 128;
constexpr int kLossTile = kLossThreads;  // tokens: one per thread in the work that models share
constexpr int kTileWords = kLossTile / 32;
constexpr std::int64_t kMostLossChunks = 512;
constexpr std::int64_t kLossMemory = std::int64_t{1} << 23;  // doubles: 64 MiB

struct LossLayout {
  std::int64_t per_chunk;  // doubles: (N, K, 2) sums, then (N) balances
  std::int64_t chunk_length, chunks;
  std::int64_t words;  // one bit for each token of the chunks
  std::int64_t group;  // positions that fit the workspace

  LossLayout() = default;
  LossLayout(const Shape& shape, std::int64_t orders) {
    per_chunk = shape.models * (2 * orders + 1);
    const std::int64_t fit = kLossMemory / per_chunk;
    const std::int64_t allowed = simulated_or(kMostLossChunks, 2);
    const std::int64_t most = fit < 1 ? 1 : fit < allowed ? fit : allowed;
    const std::int64_t tiles = (shape.vocab + kLossTile - 1) / kLossTile;
    const std::int64_t tiles_a_chunk = (tiles + most - 1) / most;
    chunk_length = tiles_a_chunk * kLossTile;
    chunks = (tiles + tiles_a_chunk - 1) / tiles_a_chunk;
    words = chunks * tiles_a_chunk * kTileWords;
    const std::int64_t rows = kLossMemory / (chunks * per_chunk);
    group = rows < 1 ? 1 : rows < shape.positions ? rows : shape.positions;
  }

  // The sums take at most 64 MiB, or the sums of one chunk if those are larger. In addition there
  // are a bit for each token and two flags.
  std::int64_t sums_bytes() const { return group * chunks * per_chunk * 8; }
  std::int64_t other_bytes() const { return group * (words + 2) * 4; }
};

struct LossOrders {
  double value[kMaxOrders];
  int integer[kMaxOrders];  // 0 for an order that is not an integer
  int count;
  bool all_integer;
};

struct LossCall {
  Ensemble in;
  Weights weights;
  Neighbours all;
  LossOrders orders;
  LossLayout layout;
  std::int64_t first;         // first position of this group
  double* sums;               // (group, chunks, per_chunk)
  std::uint32_t* rare_lanes;  // (group, words): tokens that need the log domain
  // (group): the rows are invalid or not those of the projection; some sum overflowed.
  std::int32_t *foreign, *overflowed;
  double *loss, *balance;
  const std::int32_t* done;  // (group), or null: the float kernels have written the losses

  __device__ bool finished(std::int64_t member) const { return done != nullptr && done[member]; }
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

// The chunk that a block works on.
struct LossChunk {
  std::int64_t member;  // index in the group
  std::int64_t position, begin, end;
  double* sums;
  std::uint32_t* row_lanes;  // the bits of all tokens of the position

  // The words of the tile that begins at `tile_begin`.
  __device__ std::uint32_t* rare_lanes(std::int64_t tile_begin) const {
    return row_lanes + tile_begin / 32;
  }
};

__device__ inline LossChunk loss_chunk(const LossCall& call) {
  const std::int64_t member = blockIdx.x / call.layout.chunks;
  const std::int64_t begin = blockIdx.x % call.layout.chunks * call.layout.chunk_length;
  const std::int64_t end = begin + call.layout.chunk_length;
  return {member,
          call.first + member,
          begin,
          end < call.in.shape.vocab ? end : call.in.shape.vocab,
          call.sums + blockIdx.x * call.layout.per_chunk,
          call.rare_lanes + member * call.layout.words};
}

ADAPMIXED_CORE_END
