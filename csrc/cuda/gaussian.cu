#include "cuda/gaussian.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace core = adapmixed::ADAPMIXED_ISA;

void gaussian(const std::uint8_t* key, std::uint64_t counter, double sigma, std::int64_t count,
              double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t per_block = 8 * core::kGaussianThreads;
  launch(queue, core::gaussian_kernel, grid_of((count + per_block - 1) / per_block),
         dim3(core::kGaussianThreads), 0, core::key_of(key), counter, sigma, count, result);
}

}  // namespace adapmixed::cuda
