// Large targets: which tokens of a row may be on a list (project/row_search.h), from one read of
// the row that needs no log-sum-exp yet.
//
// log q + s log r is S - lse_0 - s (lse - lse_0) with the score S = s z + (1 - s) z_0, s = order or
// 1 - order. The first kernel computes scores in floats and leaves the largest of each kind for
// every kAtOnce tokens. The second knows the log-sum-exps and looks only at tokens of such a group
// whose largest score comes near its threshold.
//
// Rounding, in units (kFloatUnit): two products, their factors and a sum move S by at most
// 2 |S| + 3 order Z, Z the largest |z_0| near the group. 4 |threshold| + 4 order Z are allowed for.
#pragma once

#include "common/float_ratio.h"
#include "common/row_pair.cuh"
#include "common/row_parts.cuh"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// The upper halves of two floats.
ADAPMIXED_HD std::uint32_t packed(float low, float high) {
  std::uint32_t a, b;
  std::memcpy(&a, &low, sizeof a);
  std::memcpy(&b, &high, sizeof b);
  return a >> 16 | (b & 0xffff0000u);
}
// At least the number of which it is the upper half.
ADAPMIXED_HD double unpacked_above(std::uint32_t half) {
  const std::uint32_t bits = half << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x > 0.0f ? x * (1.0 + 0x1p-7) + 1e-37 : x;
}

// For row_parts_kernel. A part of the public row gets its largest |z_0|, masked tokens aside.
struct ScoreLook {
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
    scores[at + lane_id()] = packed(found.forward, found.reverse);
    found = {};
  }
  __device__ void finish(const Found&, RowPart&) const {}
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

// A row with the scores that the first kernel has left.
template <Dtype D>
struct ScoredRow {
  RowPair<D> pair;
  RowParts cut;
  const std::uint32_t* scores;  // of this row
  const RowPart* public_parts;  // of its position
  double order;

  // Calls visit(log q, t) for the tokens of this thread, at least for all with
  // log q + s log r > threshold and those that the public row alone masks. A whole warp must call
  // this together.
  template <class Visit>
  __device__ void for_each(bool reverse, double threshold, const Visit& visit) const {
    const double s = reverse ? 1.0 - order : order;
    const double wanted = threshold + pair.public_lse + s * pair.shift;
    const int stretches = cut.stretches();
    const int items = cut.count * stretches;
    for (int item = warp_id(); item < items; item += warp_count()) {
      const int part = item / stretches;
      const std::uint32_t word = scores[static_cast<std::int64_t>(item) * kWarp + lane_id()];
      const double score = unpacked_above(reverse ? word >> 16 : word & 0xffffu);
      const double far = order * public_parts[part].high;
      const double slack = 1e-3 + 4.0 * kFloatUnit * (std::fabs(wanted) + far);
      unsigned hits = __ballot_sync(kAllLanes, score > wanted - slack || !(far < 1e30));
      // The token of the group of lane 0 that this lane looks at.
      const std::int64_t own = static_cast<std::int64_t>(part) * cut.length +
                               item % stretches * kStretch + lane_id() * kWarp;
      while (hits != 0) {
        double log_q[kHitsAtOnce], t[kHitsAtOnce];
        bool there[kHitsAtOnce];
#pragma unroll
        for (int k = 0; k < kHitsAtOnce; ++k) {
          const std::int64_t v = own + __ffs(static_cast<int>(hits)) - 1;
          there[k] = hits != 0 && v < pair.vocab;
          hits &= hits - 1;
          const double z = there[k] ? logit<D>(pair.private_row, v) : 0.0f;
          const double z0 = there[k] ? logit<D>(pair.public_row, v) : 0.0f;
          log_q[k] = z0 - pair.public_lse;
          t[k] = z - z0 - pair.shift;
        }
#pragma unroll
        for (int k = 0; k < kHitsAtOnce; ++k) {
          if (there[k]) visit(log_q[k], t[k]);
        }
      }
    }
  }

 private:
  static constexpr int kHitsAtOnce = 4;  // loads that are on their way together
};

ADAPMIXED_CORE_END
