// The operators of the CUDA back end, which this folder's scheduler runs on CPU memory.
#include <pybind11/stl.h>

#include "bindings.h"
#include "common/launch.cuh"
#include "simt.h"

namespace py = pybind11;

namespace {

// Launched only to test the limit of shared memory, which each kernel has for itself.
template <bool kAsked>
__global__ void idle_kernel() {}

}  // namespace

PYBIND11_MODULE(_cuda_on_cpu, m) {
  adapmixed::bindings::add_of_cuda(m);
  m.def("set_order", [](const std::string& name, unsigned seed) {
    simt::config.order = name == "forward"   ? simt::Order::forward
                         : name == "reverse" ? simt::Order::reverse
                                             : simt::Order::random;
    simt::config.seed = seed;
  });
  m.def("set_errors", [](int which) { simt::config.errors = static_cast<simt::Errors>(which); });
  m.def("check", [](const std::string& error) {
    for (int k = cudaSuccess; k <= cudaErrorUnknown; ++k) {
      const auto found = static_cast<cudaError_t>(k);
      if (error == cudaGetErrorName(found)) adapmixed::cuda::check(found);
    }
  });
  // Launches like the kernels do, or without asking for shared memory.
  m.def("launch_idle", [](std::size_t shared, bool asked) {
    if (asked) {
      adapmixed::cuda::launch({}, idle_kernel<true>, dim3(1), dim3(32), shared);
    } else {
      simt::launch(idle_kernel<false>, dim3(1), dim3(32), shared);
    }
  });
  m.def("launches", simt::launches);
  m.def("memsets", simt::memsets);
  m.def("shared_limits", simt::shared_limits);
  m.def("set_sizes", [](bool of_a_gpu) { simt::config.sizes_of_a_gpu = of_a_gpu; });
}
