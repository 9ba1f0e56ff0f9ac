// The single-precision sums of a tile: first the deviations of all models, a thread a token
// (cuda_float_deviations.cuh), then the models' moments (cuda_float_moments.cuh), then in double
// the tokens left out (cuda_float_exact.cuh).
#pragma once

#include "leave_one_out/cuda_float_deviations.cuh"
#include "leave_one_out/cuda_float_exact.cuh"
#include "leave_one_out/cuda_float_models.cuh"
#include "leave_one_out/cuda_float_moments.cuh"

ADAPMIXED_CORE_BEGIN

// What the warps of a block find at their tokens of a tile.
struct TileFindings {
  enum Name { kMass, kBalance, kCommon, kMiddle, kShared, kApart, kSums };
  double sums[kSums][kFloatWarps], growth[kFloatWarps];

  // A whole warp must call this together.
  __device__ void set(const TokenFindings& own) {
    double all[kSums] = {own.mass, own.balance, own.common, own.middle, own.shared, own.apart};
    double most[1] = {own.growth};
    warp_reduce(all, Add{});
    warp_reduce(most, Max{});
    if (lane_id() != 0) return;
#pragma unroll
    for (int k = 0; k < kSums; ++k) sums[k][warp_id()] = all[k];
    growth[warp_id()] = most[0];
  }
  __device__ double sum(Name name) const {
    double total = 0.0;
    for (int w = 0; w < kFloatWarps; ++w) total += sums[name][w];
    return total;
  }
  // Whether the models share more than they differ by. The bound checks the result of the guess.
  __device__ bool share() const { return sum(kShared) > kMostCommon * kMostCommon * sum(kApart); }
  // One thread calls this. Returns whether the sums are within range.
  __device__ bool add_to(TokenTotals& totals, bool in_floats) const {
    const double mass = sum(kMass), balance = sum(kBalance);
    const double common = sum(kCommon), middle = sum(kMiddle);
    double most = 0.0;
    for (int w = 0; w < kFloatWarps; ++w) most = std::fmax(growth[w], most);
    if (!(mass < WideSum::kLimit && std::fabs(balance) < WideSum::kLimit &&
          common < WideSum::kLimit && middle < WideSum::kLimit)) {
      return false;
    }
    totals.mass.add(mass);
    totals.balance.add(balance);
    totals.common.add(common);
    totals.middle.add(middle);
    add_largest(&totals.growth, most);
    if (in_floats) {
      totals.float_common.add(common);
      add_largest(&totals.float_growth, most);
    }
    return true;
  }
};

// The model that is nearest to the mean over the tile; any serves as base, and this one best. A
// whole block must call this together.
__device__ inline int nearest_model(const LossCall& call, const TileMemory& tile) {
  const int models = static_cast<int>(call.in.shape.models);
  double least = HUGE_VAL, nearest = 0.0;
  for (int i = static_cast<int>(threadIdx.x); i < models; i += kFloatThreads) {
    const float* own = tile.deviations + i * call.floats.pitch();
    float distance = 0.0f;
    for (int j = 0; j < call.floats.tile; ++j) {
      const TileToken token = tile.token(j);
      const float t = vmin(std::fabs(token.t(own[j])), 1.0f);
      distance = vfma(token.p * t, t, distance);
    }
    if (distance < least) least = distance, nearest = i;
  }
  const double least_of_all = -block_max(-least);
  return static_cast<int>(-block_max(least == least_of_all ? -nearest : -HUGE_VAL));
}

// One block per tile of a position.
template <Dtype D>
__global__ void __launch_bounds__(kFloatThreads, kFloatBlocks)
    float_sums_kernel(const __grid_constant__ LossCall call) {
  __shared__ ListedTokens listed;
  __shared__ TileFindings findings;
  __shared__ PairQueue queues[kFloatWarps];
  const FloatLayout& layout = call.floats;
  const auto tiles = static_cast<unsigned>(layout.tiles);
  const std::int64_t member = blockIdx.x / tiles, position = call.first + member;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x % tiles) * layout.tile;
  const int thread = static_cast<int>(threadIdx.x), models = static_cast<int>(call.in.shape.models);
  const FloatFacts facts = float_facts(call, member);
  if (facts.degree < 0) return;
  const PublicToken token = public_token<D>(call, position, begin + thread);
  const TileMemory tile(layout, models);
  const ModelTotals totals = model_totals(call, member);
  bool served = true;
  for (int base = -1;;) {
    for (int i = thread; i < models; i += kFloatThreads) {
      if (base < 0) {
        tile.models[i] = call.models[member * models + i];
      } else {
        tile.doubles[i] = call.doubles[member * models + i];
      }
    }
    __syncthreads();
    TokenFindings own;
    if (thread < layout.tile) {
      own = load_token<D>(call, facts, base, position, begin + thread, token, tile,
                          tile.deviations + thread, layout.pitch());
      tile.tokens[thread / 4].set(thread % 4, own.token);
    }
    findings.set(own);
    const unsigned any_wide = __ballot_sync(kAllLanes, own.wide);
    const unsigned any_for_all = __ballot_sync(kAllLanes, own.for_all);
    if (lane_id() == 0) {
      listed.wide[warp_id()] = any_wide;
      listed.for_all[warp_id()] = any_for_all;
    }
    if (__syncthreads_or(own.failed)) {  // its barrier also completes the tile
      if (thread == 0) atomicExch(&call.states[member].failed, 1);
      return;
    }
    if (base < 0 && !call.all.against_public && findings.share()) {
      base = nearest_model(call, tile);  // with barriers
      continue;
    }
    if (thread == 0) served = findings.add_to(call.totals[member], base < 0);
    break;
  }
  // The list of the first tokens is made before the moments, so that no warp waits for another.
  const int count = listed.count();
  for (int first = 0;; first += kWarp) {
    served = share_listed<D>(call, member, begin, tile, listed, first, count) && served;
    if (first == 0) {
      add_all_moments(layout, tile, listed.wide, degree_at(facts.degree), totals);
    }
    if (count == 0) break;                 // the same for every thread of the block
    if (__syncthreads_or(!served)) break;  // its barrier also completes the list
    const int here = count - first < kWarp ? count - first : kWarp;
    served = add_listed<D>(call, position, begin, tile, listed, here, queues[warp_id()], totals);
    if (first + kWarp >= count) break;
    __syncthreads();  // the list has been read
  }
  if (!served) atomicExch(&call.states[member].failed, 1);
}

ADAPMIXED_CORE_END
