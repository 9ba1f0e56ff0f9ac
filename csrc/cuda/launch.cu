#include "cuda/launch.h"

namespace adapmixed::cuda {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not to be met again by whoever asks next
  const std::string said = std::string(" (") + cudaGetErrorString(error) + ")";
  if (error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice) {
    throw std::runtime_error(
        "adapmixed_ext found no GPU, or a driver older than the CUDA version it was built with: "
        "move the tensors to the CPU, or update the driver" +
        said);
  }
  if (error == cudaErrorNoKernelImageForDevice) {
    throw std::runtime_error(
        "adapmixed_ext was not built for this GPU's architecture: build it with "
        "ADAPMIXED_CUDA_ARCHITECTURES set to it; build_info() says what was built" +
        said);
  }
  throw std::runtime_error(std::string("adapmixed_ext could not queue a kernel: ") +
                           cudaGetErrorName(error) + said);
}

dim3 grid_of(std::int64_t blocks) {
  constexpr std::int64_t kMost = 2147483647;
  if (blocks > kMost) {
    throw std::invalid_argument("a call on CUDA may take " + std::to_string(kMost) +
                                " blocks of threads, this one would take " +
                                std::to_string(blocks) + ": call it for fewer positions at a time");
  }
  return dim3(static_cast<unsigned>(blocks));
}

std::int64_t most_shared_bytes() {
#if defined(ADAPMIXED_SIMT)
  return 227 * 1024;
#else
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
#endif
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
