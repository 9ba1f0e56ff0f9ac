// The arguments of the kernels of one leave-one-out call, and where its sums lie.
//
// A block takes a chunk of the vocabulary at one position, tile by tile, and leaves its sums in the
// workspace; the chunks' sums are added in order. The number of chunks depends on V, N and K alone,
// so results are the same on every device and in every batch. Positions are queued in groups that
// share the workspace.
#pragma once

#include <algorithm>

#include "common/block.cuh"
#include "leave_one_out/bound.h"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN

constexpr int kLossThreads = 128;  // and the most tokens of a tile
constexpr std::int64_t kMostLossChunks = 512;
constexpr std::int64_t kLossMemory = std::int64_t{1} << 23;  // doubles: 64 MiB
// Dynamic shared memory with which kLossBlocks have room on a multiprocessor.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kLossBlocks = 2;
#else
constexpr int kLossBlocks = 3;
#endif
constexpr std::int64_t kLossShared = 72 * 1024;

// The constants with which one model's row is read (common/float_ratio.h).
struct alignas(16) FloatModel {
  float c, centre, slope, offset;  // delta = slope (r' - 1) + offset
};

struct alignas(16) Four {
  float v[4];
};
// Four tokens next to each other: t = x / reach of a model is middle - deviation * factor. A
// negative factor marks a token that was computed in double.
struct TileTokens {
  Four middle, factor, p;
};

// How the work is divided. A tile's deviations, of a group of models, lie in shared memory.
struct LossLayout {
  int tile, models;                   // tokens, whole warps; models of a group
  std::int64_t chunk, chunks;         // tiles of a chunk; chunks of a position
  std::int64_t per_chunk, positions;  // doubles of a chunk; positions of a launch

  LossLayout(const Shape& shape, std::int64_t orders) {
    models = static_cast<int>(std::min(shape.models, simulated_or(shape.models, 48)));
    for (tile = static_cast<int>(simulated_or(kLossThreads, 64)); tile > kWarp; tile -= kWarp) {
      if (shared_bytes() <= kLossShared) break;
    }
    while (shared_bytes() > kLossShared) models = models / 2;
    per_chunk = kHeader + shape.models * columns(kMaxMoments, orders);
    const std::int64_t tiles = (shape.vocab + tile - 1) / tile;
    const std::int64_t most = std::min(kLossMemory / per_chunk, simulated_or(kMostLossChunks, 2));
    chunk = most < 1 ? tiles : (tiles + most - 1) / most;
    chunks = (tiles + chunk - 1) / chunk;
    const std::int64_t rows = std::max<std::int64_t>(kLossMemory / (chunks * per_chunk), 1);
    positions = std::min(rows, shape.positions);
  }

  // Of a position's tokens: mass of the mixture, TokenSums (an infinite growth: no loss can be
  // bounded), and the index of the degree.
  static constexpr int kHeader = 6;
  // Numbers of a model: sum p x, sum p x^2 of listed tokens, ListedSums of both directions for each
  // order, and moments. Numbers of the same kind lie together.
  ADAPMIXED_HD static std::int64_t columns(int degree, std::int64_t orders) {
    return 2 + 8 * orders + degree;
  }
  // 4 times an odd number: lanes that read four tokens of their own models use different banks.
  ADAPMIXED_HD int pitch() const { return tile + 4; }
  ADAPMIXED_HD std::int64_t shared_bytes() const {
    return (3 * 4 + 8) * tile +
           models * (4 * pitch() + static_cast<std::int64_t>(sizeof(FloatModel)));
  }
};

struct LossOrders {
  double value[kMaxOrders];
  int count;
};

struct LossCall {
  Ensemble in;
  Weights weights;
  Neighbours all;
  LossOrders orders;
  LossLayout layout;
  double reach[kDegrees];  // moment_reach
  std::int64_t first;      // position of this launch
  double* sums;            // (positions, chunks, per_chunk)
  double *loss, *balance;

  __device__ double* chunk_sums(std::int64_t member, std::int64_t chunk) const {
    return sums + (member * layout.chunks + chunk) * layout.per_chunk;
  }
  __device__ double divisor() const { return all.against_public ? all.slots : all.slots - 1.0; }
};

// What the weights and log-sum-exps of a position say. A whole block must call this together.
struct LossFacts {
  double mean_weight, largest_weight, ratio_error;
  bool admissible;
  int degree;  // index for degree_at

  __device__ LossFacts(const LossCall& call, std::int64_t position) {
    double most[3] = {0.0, 0.0, 0.0}, total = 0.0;
    const double public_lse = call.in.public_lse[position];
    for (std::int64_t i = threadIdx.x; i < call.in.shape.models; i += blockDim.x) {
      const std::int64_t at = i * call.in.shape.positions + position;
      const double weight = call.weights.weight[at], lse = call.in.private_lse[at];
      total += weight;
      most[0] = std::fmax(most[0], weight);
      most[1] = std::fmax(most[1], double_ratio_error(lse, public_lse));
      if (!ADAPMIXED_ISA::admissible(call.in, call.weights, at)) most[2] = 1.0;
    }
    mean_weight = block_sum(total) / call.all.slots;
    block_reduce(most, Max{});
    largest_weight = call.weights.upper > 0.0 ? call.weights.upper : most[0];
    ratio_error = most[1];
    admissible = most[2] == 0.0 && std::fabs(public_lse) < HUGE_VAL;
    degree = loss_degree(call.all, largest_weight);
  }
};

ADAPMIXED_CORE_END
