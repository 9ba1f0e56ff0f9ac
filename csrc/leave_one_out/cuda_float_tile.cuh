// The single-precision sums of a chunk, tile by tile: first the deviations of all models, a thread
// a token (cuda_float_deviations.cuh), then the models' moments, a lane a model
// (cuda_float_moments.cuh), then in double the tokens left out (cuda_float_exact.cuh).
#pragma once

#include "leave_one_out/cuda_float_deviations.cuh"
#include "leave_one_out/cuda_float_exact.cuh"
#include "leave_one_out/cuda_float_models.cuh"
#include "leave_one_out/cuda_float_moments.cuh"

ADAPMIXED_CORE_BEGIN

// Tells from the moments of a chunk's first tile whether the models share more than they differ by.
// If so, returns the model nearest to their mean, else -1. The bound checks the result of the
// guess. `shared`: what they share. A whole block must call this together, after the threads have
// written the moments of their own models.
__device__ inline int base_for_double(const LossCall& call, int degree, double reach, double shared,
                                      double* sums) {
  const int models = static_cast<int>(call.in.shape.models);
  double apart = 0.0, least = HUGE_VAL, nearest = models;
  for (int i = static_cast<int>(threadIdx.x); i < models; i += kFloatThreads) {
    const double distance = ModelSums{sums + i * call.floats.per_model, degree}.moments()[0];
    apart += distance / models;
    if (distance < least) least = distance, nearest = i;
  }
  const double unit = reach * (call.all.slots - 1.0);  // of a deviation, where t is 1
  apart = block_sum(apart) * unit * unit;
  if (!(shared > kMostCommon * kMostCommon * apart)) return -1;
  const double least_of_all = -block_max(-least);
  const double first = -block_max(least == least_of_all ? -nearest : -HUGE_VAL);
  return static_cast<int>(first);
}

// Adds the tile at `begin` to the chunk's sums. Returns whether floats serve there. `fresh`: this
// is the chunk's first tile, which chooses the base. A whole block must call this together.
template <Dtype D>
__device__ bool add_tile(const LossCall& call, const FloatPosition& found, std::int64_t position,
                         std::int64_t begin, bool fresh, int& base, double* sums) {
  __shared__ std::uint32_t wide[kMostTile / 32], for_all[kMostTile / 32];
  __shared__ double token_sums[kTokenSums];  // the first thread's: registers are scarce
  const int degree = degree_at(found.degree), pitch = call.floats.pitch();
  const double reach = moment_reach(call.all.largest_order, degree);
  const int thread = static_cast<int>(threadIdx.x), models = static_cast<int>(call.in.shape.models);
  const TileMemory tile(call.floats, models, wide);
  for (;;) {
    for (int i = thread; i < models; i += kFloatThreads) {
      const std::int64_t at = i * call.in.shape.positions + position;
      if (base < 0) {
        tile.models[i] = call.models[(position - call.first) * models + i];
      } else {
        tile.doubles[i] = {call.in.private_lse[at] - call.in.public_lse[position],
                           call.weights.weight[at]};
      }
    }
    __syncthreads();
    TokenFindings own;
    if (thread < call.floats.tile) {
      own = load_token<D>(call, found, reach, base, position, begin + thread, tile,
                          tile.deviations + thread, pitch);
      tile.tokens[thread / 4].set(thread % 4, own.token);
    }
    const unsigned any_wide = __ballot_sync(kAllLanes, own.wide);
    const unsigned any_for_all = __ballot_sync(kAllLanes, own.for_all);
    if (lane_id() == 0) {
      wide[warp_id()] = any_wide;
      for_all[warp_id()] = any_for_all;
    }
    double totals[4] = {own.sums.balance, own.sums.common, own.sums.middle, own.shared};
    block_sum(totals);  // its barriers also complete the tile
    const double growth = block_max(own.sums.growth);
    if (__syncthreads_or(own.failed)) return false;
    if (thread == 0) {
      const bool in_floats = base < 0;
      token_sums[0] = totals[0], token_sums[1] = totals[1], token_sums[2] = totals[2];
      token_sums[3] = in_floats ? totals[1] : 0.0;
      token_sums[4] = growth, token_sums[5] = in_floats ? growth : 0.0;
    }
    add_all_moments(call, tile, degree, reach, fresh, sums);
    if (!fresh || base >= 0 || call.all.against_public) break;
    base = base_for_double(call, degree, reach, totals[3], sums);
    if (base < 0) break;
  }
  bool served = true;
  const double balance =
      add_exact_tokens<D>(call, degree, position, begin, tile, for_all, sums, served);
  if (thread == 0) {
    double* out = sums + models * call.floats.per_model;
    token_sums[0] += balance;
    for (int k = 0; k < kTokenSums; ++k) {
      const bool largest = k >= kTokenSums - kTokenMaxima;
      const double before = fresh ? 0.0 : out[k];
      out[k] = largest ? std::fmax(before, token_sums[k]) : before + token_sums[k];
    }
  }
  return served;
}

// One block per chunk.
template <Dtype D>
__global__ void __launch_bounds__(kFloatThreads, 2)
    float_sums_kernel(const __grid_constant__ LossCall call) {
  const FloatLayout& layout = call.floats;
  const std::int64_t member = blockIdx.x / layout.chunks, chunk = blockIdx.x % layout.chunks;
  const std::int64_t position = call.first + member;
  if (block_flag(&call.states[member].failed)) return;  // other chunks of the position raise it
  const FloatPosition found = float_position(call, member);
  bool served = found.degree >= 0;
  double* sums = float_sums(call, member, chunk);
  std::int64_t begin = chunk * layout.chunk_length;
  int base = -1;
  const int tiles = static_cast<int>(layout.chunk_length / layout.tile);
  for (int k = 0; served && k < tiles && begin < call.in.shape.vocab; ++k) {
    if (k > 0) __syncthreads();  // before the next tile overwrites this one
    served = add_tile<D>(call, found, position, begin, k == 0, base, sums);
    begin += layout.tile;
  }
  if (!served && threadIdx.x == 0) atomicExch(&call.states[member].failed, 1);
}

ADAPMIXED_CORE_END
