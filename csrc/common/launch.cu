#include "common/launch.cuh"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

namespace adapmixed::cuda {

ADAPMIXED_FILES(ADAPMIXED_DECLARE)

const Table& table() {
  static const Table all = [] {
    Table table{};
    ADAPMIXED_FILES(ADAPMIXED_ADD)
    return table;
  }();
  return all;
}

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that no later call reports it
  const std::string said = std::string(" (") + cudaGetErrorString(error) + ")";
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
    throw std::runtime_error(
        "adapmixed_ext found no GPU, or a driver older than the CUDA version it was built with: "
        "move the tensors to the CPU, or update the driver" +
        said);
  }
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    throw std::runtime_error(
        "adapmixed_ext was not built for this GPU's architecture: build it with "
        "ADAPMIXED_CUDA_ARCHITECTURES set to this one; build_info() lists those it was built for" +
        said);
  }
  throw std::runtime_error(std::string("adapmixed_ext could not queue a kernel: ") +
                           cudaGetErrorName(error) + said);
}

dim3 grid_of(std::int64_t blocks) {
  constexpr std::int64_t kMost = 2147483647;
  if (blocks > kMost) {
    throw std::invalid_argument("a call on CUDA may take at most " + std::to_string(kMost) +
                                " blocks of threads, this one would take " +
                                std::to_string(blocks) + ": pass fewer positions at a time");
  }
  return dim3(static_cast<unsigned>(blocks));
}

dim3 block_of(std::int64_t items, std::int64_t most) {
  constexpr std::int64_t kWarp = ADAPMIXED_ISA::kWarp;
  return dim3(static_cast<unsigned>(std::min((items + kWarp - 1) / kWarp * kWarp, most)));
}

void clear(const Queue& queue, unsigned* counters, std::int64_t count) {
  if (count == 0) return;
  check(cudaMemsetAsync(counters, 0, static_cast<std::size_t>(count) * sizeof *counters,
                        static_cast<cudaStream_t>(queue.stream)));
}

std::int64_t multiprocessors() {
#if defined(ADAPMIXED_SIMT)
  return 1;
#else
  int device = 0, count = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
#endif
}

std::int64_t most_shared_bytes() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

void allow_shared(const void* kernel, std::size_t bytes) {
  // By device and kernel. A kernel without a limit of its own may use 48 KiB, static memory
  // included. The limit is set once, to the device's maximum: if it were set for each launch,
  // another thread could lower it before the launch.
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::size_t> limits;
  int device = 0;
  check(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  auto limit = limits.find({device, kernel});
  if (limit == limits.end()) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel));
    const std::int64_t most =
        most_shared_bytes() - static_cast<std::int64_t>(attributes.sharedSizeBytes);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(most)));
    limit = limits.emplace(std::pair{device, kernel}, static_cast<std::size_t>(most)).first;
  }
  if (bytes > limit->second) {
    throw std::runtime_error("a kernel of adapmixed_ext needs " + std::to_string(bytes) +
                             " bytes of shared memory, but a block may have at most " +
                             std::to_string(limit->second) + " bytes of it on this GPU");
  }
}

DeviceGuard::DeviceGuard(const Queue& queue) {
  int current = 0;
  check(cudaGetDevice(&current));
  if (current == queue.device) return;
  check(cudaSetDevice(queue.device));
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace adapmixed::cuda
