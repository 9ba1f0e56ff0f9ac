// The moments of every model over a tile of tokens in single precision. Each lane takes a model and
// goes through the tokens, so nothing is added across lanes.
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

constexpr int kBurst = 16;  // tokens whose terms are added in floats

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

// Adds the moments of one model over the tile to its sums. `fresh`: this is the first tile, and the
// sums are written, not added to.
template <int kDegree>
__device__ void add_moments(const TileMemory& tile, const float* deviations, int count,
                            double reach, bool fresh, double* sums) {
  double total[kDegree + 1] = {};
#pragma unroll 1
  for (int start = 0; start < count; start += kBurst) {
    float s[kDegree + 1] = {};
    if ((tile.wide[start / 32] >> start % 32 & 0xffffu) == 0) {  // the same for all lanes
      add_burst<false>(tile.tokens + start / 4, deviations + start, s);
    } else {
      add_burst<true>(tile.tokens + start / 4, deviations + start, s);
    }
#pragma unroll
    for (int k = 0; k <= kDegree; ++k) total[k] += static_cast<double>(s[k]);
  }
  const ModelSums out{sums, kDegree};
  const auto add = [fresh](double& to, double value) { to = fresh ? value : to + value; };
  add(out.first(), total[0] * reach);
  if (fresh) out.listed_second() = 0.0;
#pragma unroll
  for (int k = 0; k < kDegree; ++k) add(out.moments()[k], total[1 + k]);
}

// A whole block must call this together; each lane takes one model.
__device__ inline void add_all_moments(const LossCall& call, const TileMemory& tile, int degree,
                                       double reach, bool fresh, double* sums) {
  const int count = static_cast<int>(call.floats.tile),
            models = static_cast<int>(call.in.shape.models);
  for (int i = static_cast<int>(threadIdx.x); i < models; i += kFloatThreads) {
    const float* own = tile.deviations + i * call.floats.pitch();
    double* out = sums + i * call.floats.per_model;
    if (degree == 4) {
      add_moments<4>(tile, own, count, reach, fresh, out);
    } else if (degree == 6) {
      add_moments<6>(tile, own, count, reach, fresh, out);
    } else if (degree == 10) {
      add_moments<10>(tile, own, count, reach, fresh, out);
    } else {
      add_moments<kMaxMoments>(tile, own, count, reach, fresh, out);
    }
    for (int k = 0; fresh && k < call.orders.count; ++k) {
      ModelSums{out, degree}.listed(k) = {0.0, 0.0, 0.0, 0.0};
    }
  }
}

ADAPMIXED_CORE_END
