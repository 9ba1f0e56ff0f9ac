// Pointers, strides, dtype in; nothing else. Validation and allocation are Python's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/chacha.h"
#include "core/normal.h"
#include "core/ops.h"

namespace py = pybind11;

namespace {

using adapmixed::Dtype;
using adapmixed::Ensemble;
using adapmixed::Logits;
using adapmixed::Shape;

// (address, stride of the model axis, stride of the position axis, dtype code)
using LogitsTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, int>;
using ShapeTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Logits logits_of(const LogitsTuple& t) {
  return {pointer<const void>(std::get<0>(t)), std::get<1>(t), std::get<2>(t),
          static_cast<Dtype>(std::get<3>(t))};
}

Shape shape_of(const ShapeTuple& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t)}; }

Ensemble ensemble_of(const ShapeTuple& shape, const LogitsTuple& private_logits,
                     const LogitsTuple& public_logits, std::uintptr_t private_lse,
                     std::uintptr_t public_lse) {
  return {shape_of(shape), logits_of(private_logits), logits_of(public_logits),
          pointer<const double>(private_lse), pointer<const double>(public_lse)};
}

std::array<std::uint8_t, 32> key_of(std::uintptr_t address) {
  std::array<std::uint8_t, 32> key{};
  const auto* bytes = pointer<const std::uint8_t>(address);
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = bytes[i];
  return key;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  namespace cpu = adapmixed::cpu;

  m.attr("with_cuda") = false;
  m.attr("compiler") = __VERSION__;
  m.attr("max_orders") = adapmixed::kMaxOrders;
  m.attr("max_logit") = adapmixed::kMaxLogit;
  m.def("instruction_set", [] { return std::string(cpu::instruction_set()); });
  m.def("use_instruction_set",
        [](const std::string& name) { return cpu::use_instruction_set(name.c_str()); });

  m.def("log_sum_exp", [](ShapeTuple shape, LogitsTuple logits, std::uintptr_t lse,
                          std::uintptr_t status, int threads) {
    const py::gil_scoped_release nogil;
    const Shape s = shape_of(shape);
    cpu::log_sum_exp(logits_of(logits), s.models, s.positions, s.vocab, pointer<double>(lse),
                     pointer<std::int32_t>(status), threads);
  });

  m.def("project", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                      std::uintptr_t public_lse, double order, double radius, std::uintptr_t weight,
                      std::uintptr_t complement, std::uintptr_t private_lse, std::uintptr_t status,
                      int threads) {
    const py::gil_scoped_release nogil;
    cpu::project({shape_of(shape), logits_of(private_logits), logits_of(public_logits),
                  pointer<const double>(public_lse)},
                 order, radius,
                 {pointer<double>(weight), pointer<double>(complement),
                  pointer<double>(private_lse), pointer<std::int32_t>(status)},
                 threads);
  });

  m.def("leave_one_out", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                            std::uintptr_t private_lse, std::uintptr_t public_lse,
                            std::uintptr_t weight, std::uintptr_t complement,
                            std::vector<double> orders, bool zero_out, std::int64_t num_models,
                            std::uintptr_t mean_excess, std::uintptr_t loss, std::uintptr_t balance,
                            int threads) {
    const py::gil_scoped_release nogil;
    const adapmixed::LeaveOneOutOptions options{orders.data(),
                                                static_cast<std::int64_t>(orders.size()), zero_out,
                                                num_models, pointer<const double>(mean_excess)};
    cpu::leave_one_out(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                       {pointer<const double>(weight), pointer<const double>(complement)}, options,
                       pointer<double>(loss), pointer<double>(balance), threads);
  });

  m.def("step", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                   double order, double radius, std::vector<double> orders, bool zero_out,
                   std::int64_t num_models, std::uintptr_t weight, std::uintptr_t complement,
                   std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t status,
                   std::uintptr_t loss, std::uintptr_t public_status, std::uintptr_t balance,
                   int threads) {
    const py::gil_scoped_release nogil;
    const adapmixed::LeaveOneOutOptions options{
        orders.data(), static_cast<std::int64_t>(orders.size()), zero_out, num_models, nullptr};
    cpu::step({shape_of(shape), logits_of(private_logits), logits_of(public_logits)}, order, radius,
              options,
              {{pointer<double>(weight), pointer<double>(complement), pointer<double>(private_lse),
                pointer<std::int32_t>(status)},
               pointer<double>(public_lse),
               pointer<std::int32_t>(public_status),
               pointer<double>(loss),
               pointer<double>(balance)},
              threads);
  });

  m.def("mixture", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                      std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t weight,
                      std::uintptr_t complement, std::uintptr_t probabilities, int threads) {
    const py::gil_scoped_release nogil;
    cpu::mixture(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                 {pointer<const double>(weight), pointer<const double>(complement)},
                 pointer<double>(probabilities), threads);
  });

  m.def("log_prob",
        [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
           std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t weight,
           std::uintptr_t complement, std::uintptr_t targets, std::uintptr_t result, int threads) {
          const py::gil_scoped_release nogil;
          cpu::log_prob(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                        {pointer<const double>(weight), pointer<const double>(complement)},
                        pointer<const std::int64_t>(targets), pointer<double>(result), threads);
        });

  m.def("renyi_divergence",
        [](ShapeTuple shape, LogitsTuple p_logits, LogitsTuple q_logits, std::uintptr_t p_lse,
           std::uintptr_t q_lse, std::vector<double> orders, std::uintptr_t forward,
           std::uintptr_t backward, int threads) {
          const py::gil_scoped_release nogil;
          cpu::renyi_divergence(ensemble_of(shape, p_logits, q_logits, p_lse, q_lse), orders.data(),
                                static_cast<std::int64_t>(orders.size()), pointer<double>(forward),
                                pointer<double>(backward), threads);
        });

  m.def("screen",
        [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
           std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t noise,
           std::uintptr_t active, double weight, double order, double threshold, std::int64_t top_k,
           std::int64_t num_models, std::uintptr_t divergence, std::uintptr_t passed, int threads) {
          const py::gil_scoped_release nogil;
          const adapmixed::ScreenOptions options{weight,
                                                 order,
                                                 threshold,
                                                 top_k,
                                                 num_models,
                                                 pointer<const bool>(active),
                                                 pointer<const double>(noise)};
          cpu::screen(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                      options, pointer<double>(divergence), pointer<bool>(passed), threads);
        });

  m.def("gaussian", [](std::uintptr_t key, std::uint64_t counter, double sigma, std::int64_t count,
                       std::uintptr_t result, int threads) {
    const py::gil_scoped_release nogil;
    cpu::gaussian(key_of(key).data(), counter, sigma, count, pointer<double>(result), threads);
  });

  m.def("sample",
        [](std::uintptr_t probabilities, LogitsTuple public_logits, std::int64_t positions,
           std::int64_t vocab, std::uintptr_t key, std::uint64_t counter, std::uintptr_t tokens,
           std::uintptr_t status, int threads) {
          const py::gil_scoped_release nogil;
          cpu::sample(pointer<const double>(probabilities), logits_of(public_logits), positions,
                      vocab, key_of(key).data(), counter, pointer<std::int64_t>(tokens),
                      pointer<std::int32_t>(status), threads);
        });

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
