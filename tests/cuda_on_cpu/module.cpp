// The CUDA back end's operators, run by the scheduler of this folder on memory of the CPU.
#include "bindings.h"
#include "cuda/launch.h"
#include "log_pool_bindings.h"
#include "simt.h"

namespace py = pybind11;

PYBIND11_MODULE(_cuda_on_cpu, m) {
  adapmixed::bindings::add_operators<adapmixed::Cuda>(m);
  adapmixed::bindings::add_log_pool<adapmixed::Cuda>(m);
  adapmixed::bindings::add_workspaces(m);
  m.def("set_order", [](const std::string& name, unsigned seed) {
    simt::config.order = name == "forward"   ? simt::Order::forward
                         : name == "reverse" ? simt::Order::reverse
                                             : simt::Order::random;
    simt::config.seed = seed;
  });
  m.def("check", [](const std::string& error) {
    for (int k = cudaSuccess; k <= cudaErrorUnknown; ++k) {
      const auto found = static_cast<cudaError_t>(k);
      if (error == cudaGetErrorName(found)) adapmixed::cuda::check(found);
    }
  });
  m.def("set_sizes", [](bool of_a_gpu) { simt::config.sizes_of_a_gpu = of_a_gpu; });
}
