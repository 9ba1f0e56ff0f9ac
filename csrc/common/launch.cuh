// Queueing of kernels, and the errors that report why a kernel could not be queued.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/block.cuh"
#include "common/operators.h"
#include "common/runtime.cuh"
#include "common/view.h"

namespace adapmixed::cuda {

// Throws an exception that tells the user what to do about an error of the CUDA runtime.
void check(cudaError_t error);

// Makes the queue's device current for the length of a scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(const Queue& queue);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

// Returns a grid of this many blocks. Throws std::invalid_argument if it exceeds the limit of CUDA.
dim3 grid_of(std::int64_t blocks);

// Returns a block with a thread for each item, in whole warps, but with `most` threads at most.
dim3 block_of(std::int64_t items, std::int64_t most);

// Returns the number of multiprocessors of the current device.
std::int64_t multiprocessors();

// Returns the most shared memory, static and dynamic, that a block of the current device may use.
std::int64_t most_shared_bytes();

// Allows a kernel this many bytes of dynamic shared memory on the current device. Throws
// std::runtime_error if a block may not have that much in addition to the kernel's static memory.
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

// Queues kernel(arguments...) with a warp, or a few more, for each of `count` items.
template <class... P, class... A>
void launch_warps(const Queue& queue, void (*kernel)(P...), std::int64_t count, A... arguments) {
  constexpr int kWarps = 4;  // of a block
  launch(queue, kernel, grid_of((count + kWarps - 1) / kWarps), dim3(kWarps * ADAPMIXED_ISA::kWarp),
         0, arguments...);
}

// Queues the setting of counters to 0.
void clear(const Queue& queue, unsigned* counters, std::int64_t count);

using ADAPMIXED_ISA::with_dtype;

}  // namespace adapmixed::cuda
