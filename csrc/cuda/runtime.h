// The CUDA runtime, or, where ADAPMIXED_SIMT is defined, what tests/cuda_on_cpu/ puts in its place
// to run the same kernels on a CPU.
#pragma once

#if defined(ADAPMIXED_SIMT)
#include "simt.h"
#else
#include <cuda_runtime.h>
#endif
