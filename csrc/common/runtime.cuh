// The CUDA runtime. With ADAPMIXED_SIMT, its replacement in tests/cuda_on_cpu, which runs the same
// kernels on a CPU.
#pragma once

#include <cstdint>

#include "common/config.h"

#if defined(ADAPMIXED_SIMT)
#include "simt.h"
#else
#include <cuda_runtime.h>
#endif

namespace adapmixed {

// A limit on the size of a tile or on the number of chunks. The simulation uses a lower limit
// unless told otherwise, so that the short rows of tests have several chunks of several tiles.
inline std::int64_t simulated_or(std::int64_t limit, [[maybe_unused]] std::int64_t lower) {
#if defined(ADAPMIXED_SIMT)
  if (!simt::config.sizes_of_a_gpu) return lower;
#endif
  return limit;
}

// 1 / x, 2^x and log2 x within 2, 4 and 2 units (kFloatUnit). The simulation adds errors.
#if defined(ADAPMIXED_SIMT)
using simt::near_exp2, simt::near_log2, simt::near_reciprocal;
#else
__device__ inline float near_reciprocal(float x) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
  return near;
}
ADAPMIXED_HD float near_exp2(float x) { return exp2f(x); }
ADAPMIXED_HD float near_log2(float x) { return log2f(x); }
#endif

}  // namespace adapmixed
