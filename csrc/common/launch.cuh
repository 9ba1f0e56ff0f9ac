// How kernels are queued, and what is said where they cannot be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/operators.h"
#include "common/runtime.cuh"

namespace adapmixed::cuda {

// Throws what a user can do about an error of the runtime.
void check(cudaError_t error);

// Makes the queue's device the current one, and undoes that.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Queue& queue);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// A grid of so many blocks; throws std::invalid_argument where no GPU takes them at once.
dim3 grid_of(std::int64_t blocks);

// The most shared memory, static and dynamic, that a block of the current device may have.
std::int64_t most_shared_bytes();

// Lets a kernel have so many bytes of dynamic shared memory on the current device; throws
// std::runtime_error where that and the kernel's static memory are more than a block may have
// there.
void allow_shared(const void* kernel, std::size_t bytes);

// Queues kernel(arguments...), with `shared` bytes of dynamic shared memory.
template <class... P, class... A>
void launch([[maybe_unused]] const Queue& queue, void (*kernel)(P...), dim3 grid, dim3 block,
            std::size_t shared, A... arguments) {
  if (grid.x == 0 || grid.y == 0) return;
  if (shared > 0) allow_shared(reinterpret_cast<const void*>(kernel), shared);
#if defined(ADAPMIXED_SIMT)
  simt::launch(kernel, grid, block, shared, static_cast<P>(arguments)...);
#else
  const auto stream = static_cast<cudaStream_t>(queue.stream);
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...));
#endif
}

// Calls f with the dtype as a constant: f(std::integral_constant<Dtype, ...>).
template <class F>
void with_dtype(Dtype dtype, const F& f) {
  if (dtype == Dtype::f32) {
    f(std::integral_constant<Dtype, Dtype::f32>{});
  } else if (dtype == Dtype::bf16) {
    f(std::integral_constant<Dtype, Dtype::bf16>{});
  } else {
    f(std::integral_constant<Dtype, Dtype::f16>{});
  }
}

}  // namespace adapmixed::cuda
