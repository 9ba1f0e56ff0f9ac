// The compiled module: both back ends, and access to the random numbers for the tests.
#include "bindings.h"

#include <stdexcept>
#include <string>

#include "sample/chacha.h"
#include "sample/normal.h"

#if !defined(ADAPMIXED_CUDA_ARCHITECTURES)
#define ADAPMIXED_CUDA_ARCHITECTURES ""
#endif

namespace py = pybind11;

PYBIND11_MODULE(_C, m) {
  namespace bindings = adapmixed::bindings;
  namespace cpu = adapmixed::cpu;

  m.attr("cuda_architectures") = ADAPMIXED_CUDA_ARCHITECTURES;
  m.attr("compiler") = __VERSION__;
  m.attr("max_orders") = adapmixed::kMaxOrders;
  m.attr("max_logit") = adapmixed::kMaxLogit;
  m.def("instruction_set", [] { return std::string(cpu::table().instruction_set); });
  m.def("use_instruction_set",
        [](const std::string& name) { return cpu::use_instruction_set(name.c_str()); });

  bindings::add_of_cpu(m.def_submodule("cpu"));
#if defined(ADAPMIXED_WITH_CUDA)
  m.attr("with_cuda") = true;
  bindings::add_of_cuda(m.def_submodule("cuda"));
#else
  m.attr("with_cuda") = false;
#endif

  // Consecutive 64-byte blocks of one stream (RFC 8439), by the vectorised code of the operators.
  m.def("keystream",
        [](const py::bytes& key, std::uint64_t counter, std::uint64_t first, std::int64_t count) {
          const std::string k = key;
          if (k.size() != 32 || count < 0) {
            throw std::invalid_argument("the key must have 32 bytes, and count must be at least 0");
          }
          std::string result(static_cast<std::size_t>(64 * count), '\0');
          cpu::table().keystream(reinterpret_cast<const std::uint8_t*>(k.data()), counter, first,
                                 count, reinterpret_cast<std::uint8_t*>(result.data()));
          return py::bytes(result);
        });

  // The two standard normals made from two 64-bit words.
  m.def("normal_pair", [](std::uint64_t a, std::uint64_t b) {
    const adapmixed::baseline::NormalPair<double> pair = adapmixed::baseline::normal_pair(a, b);
    return std::make_tuple(pair.first, pair.second);
  });
}
