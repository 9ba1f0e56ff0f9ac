// Large targets: which tokens of a row can matter, from one read of the row that needs no
// log-sum-exp yet.
//
// log q + s log r is S - lse_0 - s (lse - lse_0) with the score S = s z + (1 - s) z_0, s = order or
// 1 - order. The first kernel computes scores in floats and leaves the largest of each kind for
// every kAtOnce tokens. The second knows the log-sum-exps and looks only at tokens of such a group
// whose largest score comes near its threshold (cuda_row.cuh).
//
// Rounding, in units (kFloatUnit): two products, their factors and a sum move S by at most
// 2 |S| + 3 order Z, Z the largest |z_0| near the group. The threshold is rounded once.
// 4 |threshold| + 4 order Z are allowed for.
#pragma once

#include "common/float_ratio.h"
#include "common/row_parts.cuh"

ADAPMIXED_CORE_BEGIN

// The upper half of a float, rounded up; +-inf stays what it is.
ADAPMIXED_HD std::uint32_t upper_half(float x) {
  const auto bits = bit_cast<std::uint32_t>(x);
  return (x > 0.0f ? bits + 0xffffu : bits) >> 16;
}

// For row_parts_kernel. A part of the public row gets its largest |z_0|, masked tokens aside.
struct ScoreLook {
  // That a multiprocessor has room for.
  static constexpr int blocks(Dtype dtype) { return dtype == Dtype::f32 ? 3 : 4; }
  struct alignas(8) Other {
    float of_forward, of_reverse;  // (1 - s) z_0
  };
  struct Found {
    float forward = -HUGE_VALF, reverse = -HUGE_VALF;
  };

  float forward, reverse;  // s, each rounded by itself
  std::uint32_t* scores;

  __device__ Other other(float z0) const { return {reverse * z0, forward * z0}; }
  // A token that both rows mask has the score NaN, which changes nothing. One that the public row
  // alone masks has +inf.
  __device__ void see(Found& found, float z, const Other& z0) const {
    found.forward = std::fmax(found.forward, vfma(z, forward, z0.of_forward));
    found.reverse = std::fmax(found.reverse, vfma(z, reverse, z0.of_reverse));
  }
  __device__ void leave(Found& found, std::int64_t at) const {
    scores[at + lane_id()] = upper_half(found.forward) | upper_half(found.reverse) << 16;
    found = {};
  }
  template <Dtype D>
  __device__ void finish(const Found&, const typename Bits<D>::type*, int, const Other*,
                         RowPart&) const {}
  template <Dtype D>
  __device__ void finish_public(const typename Bits<D>::type* row, int size, RowPart& part) const {
    double largest[1] = {0.0};
    for (int v = lane_id(); v < size; v += kWarp) {
      const float z0 = logit<D>(row, v);
      if (z0 > -HUGE_VALF) largest[0] = vmax(static_cast<double>(std::fabs(z0)), largest[0]);
    }
    warp_reduce(largest, Max{});
    part.high = largest[0];
  }
  __device__ void begin(std::int64_t) const {}
};

ADAPMIXED_CORE_END
