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
  // loss_sums_kernel has already balanced a token whose mixture alone is rare.
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

// Adds the tokens that loss_sums_kernel marked. Mostly there are none, or masked tokens that no
// model has.
static __global__ void rare_sums_kernel(const __grid_constant__ LossCall call) {
  __shared__ RareSums shared[kLossTile];
  const LossChunk chunk = loss_chunk(call);
  if (call.finished(chunk.member)) return;
  for (std::int64_t begin = chunk.begin; begin < chunk.end; begin += kLossTile) {
    const std::uint32_t* lanes = chunk.rare_lanes(begin);
    std::uint32_t any = 0;
    for (int w = 0; w < kTileWords; ++w) any |= lanes[w];
    if (any == 0) continue;  // the same for every thread of the block
    if (lanes[warp_id()] >> lane_id() & 1u) {
      // Via a local variable: ThreadSanitizer misses a return directly into shared memory (g++ 12).
      const RareSums own =
          rare_sums(call.in, call.weights, chunk.position, begin + threadIdx.x, call.all);
      shared[threadIdx.x] = own;
    }
    __syncthreads();
    for (std::int64_t i = warp_id(); i < call.in.shape.models; i += warp_count()) {
      LaneSums sums{0.0, 0.0, 0.0};
      for (int w = 0; w < kTileWords; ++w) {
        if (lanes[w] == 0) continue;
        add_rare_tokens(call, chunk.position, i, begin + w * kWarp, lanes[w], shared + w * kWarp,
                        sums);
      }
      store_sums(call, i, sums, false, chunk.sums);
    }
    __syncthreads();  // before the next tokens are written
  }
}

// Computes sums that left the range of double again in the log domain: a divergence of 42 nats at
// order 18 is finite. The logarithms replace the sums. Nearly always there is nothing to do.
static __global__ void log_sums_kernel(const __grid_constant__ LossCall call) {
  __shared__ RareSums shared[kLossTile];
  const LossChunk chunk = loss_chunk(call);
  if (call.finished(chunk.member) || !call.overflowed[chunk.member]) return;
  for (std::int64_t begin = chunk.begin; begin < chunk.end; begin += kLossTile) {
    const std::int64_t v = begin + threadIdx.x;
    if (v < chunk.end) {
      const RareSums own = rare_sums(call.in, call.weights, chunk.position, v, call.all);
      shared[threadIdx.x] = own;  // as above
    }
    __syncthreads();
    const std::int64_t left = chunk.end - begin;
    const int count = left < kLossTile ? static_cast<int>(left) : kLossTile;
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
