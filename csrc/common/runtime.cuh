// The CUDA runtime, or, where ADAPMIXED_SIMT is defined, what tests/cuda_on_cpu/ puts in its place
// to run the same kernels on a CPU.
#pragma once

#include <cstdint>

#if defined(ADAPMIXED_SIMT)
#include "simt.h"
#else
#include <cuda_runtime.h>
#endif

namespace adapmixed {

// A limit on the size of a tile or on the number of chunks. The simulation has a lower one, where
// it is not told otherwise, so that the tests' short rows have several chunks of several tiles.
inline std::int64_t simulated_or(std::int64_t limit, [[maybe_unused]] std::int64_t lower) {
#if defined(ADAPMIXED_SIMT)
  if (!simt::config.sizes_of_a_gpu) return lower;
#endif
  return limit;
}

}  // namespace adapmixed
