// The tokens of the leave-one-out sums that need the log domain: those that the sums over q left
// out, and all tokens of a position whose sums overflowed. One thread per token finds the numbers
// that all models share; then each warp takes models in turn.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_sums.cuh"
#include "leave_one_out/rare.h"

ADAPMIXED_CORE_BEGIN

// Adds up to 32 tokens, those whose bits are set in `lanes`. `begin` and `shared` belong to the
// first lane. A whole warp must call this together.
__device__ inline void add_rare_tokens(const LossCall& call, std::int64_t position,
                                       std::int64_t model, std::int64_t begin, unsigned lanes,
                                       const RareSums* shared, LaneSums& sums) {
  const bool here = lanes >> lane_id() & 1u;
  const std::int64_t v = begin + lane_id();
  // add_tokens has already balanced a token whose mixture alone is rare.
  if (here && shared[lane_id()].log_q < kWildLogQ) {
    sums.gained += rare_gain(call.in, call.weights, model, position, v);
  }
  const bool counts = here && !shared[lane_id()].negligible;
  if (!__any_sync(kAllLanes, counts)) return;
  // A lane without a token reads nothing: nobody may have written there.
  const RareSums own = counts ? shared[lane_id()] : RareSums{};
  const RareToken token(call.in, call.weights, position, v, call.all, own);
  const double log_other = counts ? token.log_neighbour(model) : 0.0;
  for (int k = 0; k < call.orders.count; ++k) {
    double forward = 0.0, reverse = 0.0;
    if (counts) token.add(log_other, call.orders.value[k], forward, reverse);
    sums.add(k, forward, reverse);
  }
}

// Finds the shared numbers of the tile's tokens whose bits are set in `lanes`. A whole block must
// call this together.
__device__ inline void load_rare(const LossCall& call, std::int64_t position, std::int64_t begin,
                                 const std::uint32_t* lanes, RareSums* shared) {
  if (lanes[warp_id()] >> lane_id() & 1u) {
    // Via a local variable: ThreadSanitizer misses a return directly into shared memory (g++ 12).
    const RareSums own = rare_sums(call.in, call.weights, position, begin + threadIdx.x, call.all);
    shared[threadIdx.x] = own;
  }
  __syncthreads();
}

// Sums a chunk. A whole block must call this together.
template <Dtype D>
__device__ void sum_chunk(const LossCall& call, const LossChunk& chunk, LossTile& tile,
                          RareSums* shared) {
  __shared__ std::uint32_t rare_lanes[kTileWords];
  for (std::int64_t begin = chunk.begin; begin < chunk.end; begin += kLossTile) {
    load_tile<D>(call, chunk.position, begin, chunk.end, tile, rare_lanes);
    __syncthreads();
    if (warp_id() == 0) store_mass(tile, begin == chunk.begin, chunk.sums[call.mass_at()]);
    for (int i = warp_id(); i < call.in.shape.models; i += warp_count()) {
      const ModelRow<D> row = model_row<D>(call.in, call.weights, i, chunk.position);
      LaneSums sums{0.0, 0.0, 0.0};
      add_tokens<D>(call, chunk.position, i, row, begin, tile, sums);
      store_sums(call, i, sums, begin == chunk.begin, chunk.sums);
    }
    std::uint32_t any = 0;
    for (int w = 0; w < kTileWords; ++w) any |= rare_lanes[w];
    // Mostly there are none, or masked tokens that no model has.
    if (any != 0) {  // the same for every thread of the block
      load_rare(call, chunk.position, begin, rare_lanes, shared);
      for (int i = warp_id(); i < call.in.shape.models; i += warp_count()) {
        LaneSums sums{0.0, 0.0, 0.0};
        for (int w = 0; w < kTileWords; ++w) {
          if (rare_lanes[w] == 0) continue;
          add_rare_tokens(call, chunk.position, i, begin + w * kWarp, rare_lanes[w],
                          shared + w * kWarp, sums);
        }
        store_sums(call, i, sums, false, chunk.sums);
      }
    }
    __syncthreads();  // before the next tile is written
  }
}

// Computes sums that left the range of double again in the log domain: a divergence of 42 nats at
// order 18 is finite. The logarithms replace the sums. A whole block must call this together.
__device__ inline void log_sum_chunk(const LossCall& call, const LossChunk& chunk,
                                     RareSums* shared) {
  for (std::int64_t begin = chunk.begin; begin < chunk.end; begin += kLossTile) {
    const std::int64_t left = chunk.end - begin;
    const int count = left < kLossTile ? static_cast<int>(left) : kLossTile;
    if (static_cast<int>(threadIdx.x) < count) {
      const RareSums own =
          rare_sums(call.in, call.weights, chunk.position, begin + threadIdx.x, call.all);
      shared[threadIdx.x] = own;  // as above
    }
    __syncthreads();
    for (std::int64_t i = warp_id(); i < call.in.shape.models; i += warp_count()) {
      for (int k = 0; k < call.orders.count; ++k) {
        if (call.loss_of(i, chunk.position)[k] != HUGE_VAL) continue;
        double logs[2] = {-HUGE_VAL, -HUGE_VAL};
        for (int lane = lane_id(); lane < count; lane += kWarp) {
          const RareToken token(call.in, call.weights, chunk.position, begin + lane, call.all,
                                shared[lane]);
          token.add_log(token.log_neighbour(i), call.orders.value[k], logs[0], logs[1]);
        }
        warp_reduce(logs, LogAdd{});
        if (lane_id() != 0) continue;
        double* out = chunk.sums + call.sums_at(i, k);
        out[0] = begin == chunk.begin ? logs[0] : LogAdd{}(out[0], logs[0]);
        out[1] = begin == chunk.begin ? logs[1] : LogAdd{}(out[1], logs[1]);
      }
    }
    __syncthreads();  // before the next tokens are written
  }
}

ADAPMIXED_CORE_END
