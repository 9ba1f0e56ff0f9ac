// The compiled module: both back ends, and what the tests see of the random numbers.
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
  m.def("instruction_set", [] { return std::string(cpu::instruction_set()); });
  m.def("use_instruction_set",
        [](const std::string& name) { return cpu::use_instruction_set(name.c_str()); });

  py::module_ cpu_operators = m.def_submodule("cpu");
  bindings::add_operators<adapmixed::Cpu>(cpu_operators);
#if defined(ADAPMIXED_WITH_CUDA)
  m.attr("with_cuda") = true;
  py::module_ cuda = m.def_submodule("cuda");
  bindings::add_operators<adapmixed::Cuda>(cuda);
  bindings::add_workspaces(cuda);
#else
  m.attr("with_cuda") = false;
#endif

  // RFC 8439, section 2.3: the 64 bytes of one block.
  m.def("chacha20_block", [](const py::bytes& key, std::uint32_t block, const py::bytes& nonce) {
    const std::string k = key, n = nonce;
    if (k.size() != 32 || n.size() != 12) {
      throw std::invalid_argument("key must have 32 bytes and nonce 12");
    }
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(n.data());
    const std::uint32_t words[3] = {adapmixed::baseline::little_endian(bytes),
                                    adapmixed::baseline::little_endian(bytes + 4),
                                    adapmixed::baseline::little_endian(bytes + 8)};
    std::uint32_t out[16];
    adapmixed::baseline::chacha20_block(reinterpret_cast<const std::uint8_t*>(k.data()), words,
                                        block, out);
    std::string result(64, '\0');
    for (int i = 0; i < 64; ++i) result[i] = static_cast<char>(out[i / 4] >> (8 * (i % 4)));
    return py::bytes(result);
  });

  // The following blocks of one stream, as the vectorised operators take them.
  m.def("keystream",
        [](const py::bytes& key, std::uint64_t counter, std::uint64_t first, std::int64_t count) {
          const std::string k = key;
          if (k.size() != 32 || count < 0) {
            throw std::invalid_argument("key must have 32 bytes, count must be >= 0");
          }
          std::string result(static_cast<std::size_t>(64 * count), '\0');
          cpu::keystream(reinterpret_cast<const std::uint8_t*>(k.data()), counter, first, count,
                         reinterpret_cast<std::uint8_t*>(result.data()));
          return py::bytes(result);
        });

  // The two standard normals of two 64-bit words.
  m.def("normal_pair", [](std::uint64_t a, std::uint64_t b) {
    const adapmixed::baseline::NormalPair<double> pair = adapmixed::baseline::normal_pair(a, b);
    return std::make_tuple(pair.first, pair.second);
  });
}
