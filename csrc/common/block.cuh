// Operations that the threads of one block carry out together. Every thread of the block must call
// them, and every thread gets the result. Sums are taken in a fixed order, so that results are
// bitwise the same on every run.
#pragma once

#include "common/elementary.h"
#include "common/runtime.cuh"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / kWarp; }
__device__ inline int warp_count() { return static_cast<int>(blockDim.x) / kWarp; }
// The number of this warp among those of all blocks.
__device__ inline std::int64_t warp_of_grid() {
  return static_cast<std::int64_t>(blockIdx.x) * warp_count() + warp_id();
}

struct Add {
  __device__ double operator()(double a, double b) const { return a + b; }
};
struct Max {
  __device__ double operator()(double a, double b) const { return a > b ? a : b; }
};

// The dynamic shared memory of this launch, 16-byte aligned.
template <class T>
__device__ inline T* dynamic_shared() {
#if defined(ADAPMIXED_SIMT)
  return static_cast<T*>(simt::dynamic_shared());
#else
  extern __shared__ double2 adapmixed_shared[];
  return reinterpret_cast<T*>(adapmixed_shared);
#endif
}

// `combine` must commute: partners in the butterfly see each other's operands swapped.
template <int kCount, class Combine>
__device__ void warp_reduce(double (&values)[kCount], const Combine& combine) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      values[k] = combine(values[k], __shfl_xor_sync(kAllLanes, values[k], step));
    }
  }
}

// The number of threads must be a multiple of kWarp.
template <int kCount, class Combine>
__device__ void block_reduce(double (&values)[kCount], const Combine& combine) {
  __shared__ double partial[kCount * kMaxWarps];
  warp_reduce(values, combine);
  if (lane_id() == 0) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) partial[k * kMaxWarps + warp_id()] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    double total = partial[k * kMaxWarps];
    for (int w = 1; w < warp_count(); ++w) total = combine(total, partial[k * kMaxWarps + w]);
    values[k] = total;
  }
  __syncthreads();  // the next call writes to `partial`
}

template <int kCount>
__device__ void block_sum(double (&values)[kCount]) {
  block_reduce(values, Add{});
}
__device__ inline double block_sum(double value) {
  double values[1] = {value};
  block_reduce(values, Add{});
  return values[0];
}
__device__ inline double block_max(double value) {
  double values[1] = {value};
  block_reduce(values, Max{});
  return values[0];
}

// Tells whether this block is the last of `count` that call this for the same counter, which starts
// at 0. What the first threads of the others wrote before is then visible to the whole block.
__device__ inline bool is_last_block(unsigned* counter, unsigned count) {
  int last = 0;
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&counter[0], 1u) == count - 1;
    __threadfence();
  }
  return __syncthreads_or(last) != 0;
}

__device__ inline unsigned __int128 shuffle_up(unsigned __int128 value, int by) {
  const std::uint64_t high = __shfl_up_sync(kAllLanes, static_cast<std::uint64_t>(value >> 64), by);
  const std::uint64_t low = __shfl_up_sync(kAllLanes, static_cast<std::uint64_t>(value), by);
  return static_cast<unsigned __int128>(high) << 64 | low;
}

// log(e^a + e^b). +inf stays +inf: it marks a token that one of the two mixtures lacks.
struct LogAdd {
  __device__ double operator()(double a, double b) const {
    return a == HUGE_VAL || b == HUGE_VAL ? HUGE_VAL : log_add(a, b);
  }
};

ADAPMIXED_CORE_END
