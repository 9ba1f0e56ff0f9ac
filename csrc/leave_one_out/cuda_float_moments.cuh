// The moments of every model over a tile of tokens in single precision. A lane goes through the
// tokens for one model, so hardly anything is added across lanes.
#pragma once

#include "leave_one_out/cuda_call.cuh"

ADAPMIXED_CORE_BEGIN

// Adds p t^{1+k} to s[k], with at most 1 + k roundings (leave_one_out/bound.h).
template <int kCount>
__device__ inline void add_powers(float p, float t, float (&s)[kCount]) {
  const float square = t * t, cube = square * t, fourth = square * square;
  s[0] = vfma(p, t, s[0]);
  s[1] = vfma(p, square, s[1]);
  s[2] = vfma(p, cube, s[2]);
  float power = p * fourth;
#pragma unroll
  for (int k = 3; k < kCount; k += 4) {
    s[k] = s[k] + power;
    if (k + 1 < kCount) s[k + 1] = vfma(power, t, s[k + 1]);
    if (k + 2 < kCount) s[k + 2] = vfma(power, square, s[k + 2]);
    if (k + 3 < kCount) s[k + 3] = vfma(power, cube, s[k + 3]);
    if (k + 4 < kCount) power = power * fourth;
  }
}

constexpr int kBurst = 16;  // tokens whose terms are added one by one; then bursts are added

// Adds up a burst. `kWide`: some |t| may exceed 1, and those terms are left out.
template <bool kWide, int kCount>
__device__ void add_burst(const TileTokens* tokens, const float* deviations, float (&s)[kCount]) {
#pragma unroll 2
  for (int k = 0; k < kBurst; k += 4, ++tokens, deviations += 4) {
    const TileTokens token = *tokens;
    const Four e = four_at(deviations);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float t = token.at(j).t(e.v[j]);
      if (kWide) t = std::fabs(t) <= 1.0f ? t : 0.0f;
      add_powers(token.p.v[j], t, s);
    }
  }
}

// Lanes that share a model: each takes a part of the tile. Each half of a warp takes as many models
// as it has lanes.
constexpr int kTileParts = 2;
constexpr int kModelLanes = kWarp / kTileParts;
// A lane's bursts are added up from 0, then the lanes' sums.
static_assert(kBurst + kFloatThreads / kTileParts / kBurst - 1 + kTileParts - 1 <=
              kMomentAdditions);

// Adds the moments over the tile of the models from `first` on to their totals. `wide`: bits of the
// tokens at which some |t| may exceed 1. A whole warp must call this together.
template <int kDegree>
__device__ void add_moments(const FloatLayout& layout, const TileMemory& tile,
                            const std::uint32_t* wide, int first, const ModelTotals& totals) {
  const int models = static_cast<int>(totals.models), i = first + lane_id() % kModelLanes;
  const int part = lane_id() / kModelLanes, length = layout.tile / kTileParts;
  // A lane without a model reads the last one's deviations.
  const float* deviations = tile.deviations + (i < models ? i : models - 1) * layout.pitch();
  float total[kDegree + 1] = {};
#pragma unroll 1
  for (int start = 0; start < length; start += kBurst) {
    float s[kDegree + 1] = {};
    const int at = part * length + start, of_other = (1 - part) * length + start;
    const std::uint32_t bits = wide[at / 32] >> at % 32 | wide[of_other / 32] >> of_other % 32;
    if ((bits & 0xffffu) == 0) {  // the same for all lanes
      add_burst<false>(tile.tokens + at / 4, deviations + at, s);
    } else {
      add_burst<true>(tile.tokens + at / 4, deviations + at, s);
    }
#pragma unroll
    for (int k = 0; k <= kDegree; ++k) total[k] = total[k] + s[k];
  }
#pragma unroll
  for (int k = 0; k <= kDegree; ++k) {
    total[k] = total[k] + __shfl_xor_sync(kAllLanes, total[k], kModelLanes);
  }
  if (i >= models) return;
#pragma unroll
  for (int k = 0; k <= kDegree; ++k) {
    if (k % kTileParts == part) add_fixed(totals.fixed + k * models + i, total[k]);
  }
}

// A whole block must call this together.
__device__ inline void add_all_moments(const FloatLayout& layout, const TileMemory& tile,
                                       const std::uint32_t* wide, int degree,
                                       const ModelTotals& totals) {
  for (int first = warp_id() * kModelLanes; first < totals.models;
       first += kFloatWarps * kModelLanes) {
    if (degree == 4) {
      add_moments<4>(layout, tile, wide, first, totals);
    } else if (degree == 6) {
      add_moments<6>(layout, tile, wide, first, totals);
    } else if (degree == 10) {
      add_moments<10>(layout, tile, wide, first, totals);
    } else {
      add_moments<kMaxMoments>(layout, tile, wide, first, totals);
    }
  }
}

ADAPMIXED_CORE_END
