// What the first kernel of a pool looks for besides the log-sum-exps: the extremes of the
// log-ratios.
#pragma once

#include <type_traits>

#include "common/row_parts.cuh"

ADAPMIXED_CORE_BEGIN

// fl(a - b), rounded down and up.
__device__ inline float difference_down(float a, float b) {
#if defined(ADAPMIXED_SIMT)
  const double exact = static_cast<double>(a) - b;
  const float near = static_cast<float>(exact);
  return near > exact ? std::nextafterf(near, -HUGE_VALF) : near;
#else
  return __fsub_rd(a, b);
#endif
}
__device__ inline float difference_up(float a, float b) { return -difference_down(b, a); }

// What a pool looks for in its first read: the extremes of z - z_0 over the tokens with q > 0.
// Clears the position's counter for the second.
//
// fp32: in double. 16 bits: in floats, rounded down and up. The extremes of both are the same if
// the extreme differences are floats, as they nearly always are. If not, the part is read again.
template <Dtype D>
struct PoolLook {
  static constexpr bool kFloats = D != Dtype::f32;
  static constexpr int blocks(Dtype) {
    return kFloats ? 4 : 2;
  }  // that a multiprocessor has room for
  using Other = std::conditional_t<kFloats, float, double>;
  struct Doubles {
    double low = HUGE_VAL, high = -HUGE_VAL;
  };
  struct Floats {
    float low_down = HUGE_VALF, low_up = HUGE_VALF;
    float high_down = -HUGE_VALF, high_up = -HUGE_VALF;
  };
  using Found = std::conditional_t<kFloats, Floats, Doubles>;

  unsigned* counters;

  __device__ Other other(float z0) const { return z0 == -HUGE_VALF ? NAN : z0; }
  // NaN changes nothing.
  __device__ void see(Doubles& found, float z, double z0) const {
    const double difference = z - z0;
    found.low = vmin(difference, found.low);
    found.high = vmax(difference, found.high);
  }
  __device__ void see(Floats& found, float z, float z0) const {
    const float down = difference_down(z, z0), up = difference_up(z, z0);
    found.low_down = std::fmin(found.low_down, down);
    found.low_up = std::fmin(found.low_up, up);
    found.high_down = std::fmax(found.high_down, down);
    found.high_up = std::fmax(found.high_up, up);
  }
  __device__ void leave(Found&, std::int64_t) const {}
  template <Dtype>
  __device__ void finish(const Found& found, const typename Bits<D>::type* row, int size,
                         const Other* others, RowPart& part) const {
    Doubles exact;
    if constexpr (kFloats) {
      exact = {found.low_down, found.high_up};
      const bool rounded = found.low_down != found.low_up || found.high_down != found.high_up;
      if (__any_sync(kAllLanes, rounded)) {
        exact = {};
        for (int v = lane_id(); v < size; v += kWarp) see(exact, logit<D>(row, v), others[v]);
      }
    } else {
      exact = found;
    }
    double extremes[2] = {-exact.low, exact.high};
    warp_reduce(extremes, Max{});
    part.low = -extremes[0], part.high = extremes[1];
  }
  template <Dtype>
  __device__ void finish_public(const typename Bits<D>::type*, int, RowPart&) const {}
  __device__ void begin(std::int64_t position) const { counters[position] = 0; }
};

ADAPMIXED_CORE_END
