// The operators of one back end as Python sees them: pointers, strides, dtype in; nothing else.
// Validation and allocation are Python's.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "core/ops.h"

namespace adapmixed::bindings {

namespace py = pybind11;

// (address, stride of the model axis, stride of the position axis, dtype code)
using LogitsTuple = std::tuple<std::uintptr_t, std::int64_t, std::int64_t, int>;
using ShapeTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Logits logits_of(const LogitsTuple& t) {
  return {pointer<const void>(std::get<0>(t)), std::get<1>(t), std::get<2>(t),
          static_cast<Dtype>(std::get<3>(t))};
}

inline Shape shape_of(const ShapeTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t)};
}

inline Ensemble ensemble_of(const ShapeTuple& shape, const LogitsTuple& private_logits,
                            const LogitsTuple& public_logits, std::uintptr_t private_lse,
                            std::uintptr_t public_lse) {
  return {shape_of(shape), logits_of(private_logits), logits_of(public_logits),
          pointer<const double>(private_lse), pointer<const double>(public_lse)};
}

inline std::array<std::uint8_t, 32> key_of(std::uintptr_t address) {
  std::array<std::uint8_t, 32> key{};
  const auto* bytes = pointer<const std::uint8_t>(address);
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = bytes[i];
  return key;
}

#define ADAPMIXED_OPERATORS(backend)                                   \
  static constexpr auto log_sum_exp = &backend::log_sum_exp;           \
  static constexpr auto project = &backend::project;                   \
  static constexpr auto leave_one_out = &backend::leave_one_out;       \
  static constexpr auto step = &backend::step;                         \
  static constexpr auto mixture = &backend::mixture;                   \
  static constexpr auto log_prob = &backend::log_prob;                 \
  static constexpr auto renyi_divergence = &backend::renyi_divergence; \
  static constexpr auto screen = &backend::screen;                     \
  static constexpr auto gaussian = &backend::gaussian;                 \
  static constexpr auto sample = &backend::sample

// Where is a number of threads.
struct Cpu {
  using Where = int;
  static int place(int threads) { return threads; }
  ADAPMIXED_OPERATORS(cpu);
};

// Where is (device, stream, workspace).
struct Cuda {
  using Where = std::tuple<int, std::uintptr_t, std::uintptr_t>;
  static cuda::Queue place(const Where& where) {
    return {std::get<0>(where), pointer<void>(std::get<1>(where)),
            pointer<void>(std::get<2>(where))};
  }
  ADAPMIXED_OPERATORS(cuda);
};

#undef ADAPMIXED_OPERATORS

template <class Backend>
void add_operators(py::module_ m) {
  m.def("log_sum_exp", [](ShapeTuple shape, LogitsTuple logits, std::uintptr_t lse,
                          std::uintptr_t status, typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    const Shape s = shape_of(shape);
    Backend::log_sum_exp(logits_of(logits), s.models, s.positions, s.vocab, pointer<double>(lse),
                         pointer<std::int32_t>(status), Backend::place(where));
  });

  m.def("project", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                      std::uintptr_t public_lse, double order, double radius, std::uintptr_t weight,
                      std::uintptr_t complement, std::uintptr_t private_lse, std::uintptr_t status,
                      typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    Backend::project({shape_of(shape), logits_of(private_logits), logits_of(public_logits),
                      pointer<const double>(public_lse)},
                     order, radius,
                     {pointer<double>(weight), pointer<double>(complement),
                      pointer<double>(private_lse), pointer<std::int32_t>(status)},
                     Backend::place(where));
  });

  m.def("leave_one_out", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                            std::uintptr_t private_lse, std::uintptr_t public_lse,
                            std::uintptr_t weight, std::uintptr_t complement,
                            std::vector<double> orders, bool zero_out, std::int64_t num_models,
                            std::uintptr_t mean_excess, std::uintptr_t loss, std::uintptr_t balance,
                            typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    const LeaveOneOutOptions options{orders.data(), static_cast<std::int64_t>(orders.size()),
                                     zero_out, num_models, pointer<const double>(mean_excess)};
    Backend::leave_one_out(
        ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
        {pointer<const double>(weight), pointer<const double>(complement)}, options,
        pointer<double>(loss), pointer<double>(balance), Backend::place(where));
  });

  m.def("step",
        [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits, double order,
           double radius, std::vector<double> orders, bool zero_out, std::int64_t num_models,
           std::uintptr_t weight, std::uintptr_t complement, std::uintptr_t private_lse,
           std::uintptr_t public_lse, std::uintptr_t status, std::uintptr_t loss,
           std::uintptr_t public_status, std::uintptr_t balance, typename Backend::Where where) {
          const py::gil_scoped_release nogil;
          const LeaveOneOutOptions options{orders.data(), static_cast<std::int64_t>(orders.size()),
                                           zero_out, num_models, nullptr};
          Backend::step({shape_of(shape), logits_of(private_logits), logits_of(public_logits)},
                        order, radius, options,
                        {{pointer<double>(weight), pointer<double>(complement),
                          pointer<double>(private_lse), pointer<std::int32_t>(status)},
                         pointer<double>(public_lse),
                         pointer<std::int32_t>(public_status),
                         pointer<double>(loss),
                         pointer<double>(balance)},
                        Backend::place(where));
        });

  m.def("mixture", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                      std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t weight,
                      std::uintptr_t complement, std::uintptr_t probabilities,
                      typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    Backend::mixture(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                     {pointer<const double>(weight), pointer<const double>(complement)},
                     pointer<double>(probabilities), Backend::place(where));
  });

  m.def("log_prob", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                       std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t weight,
                       std::uintptr_t complement, std::uintptr_t targets, std::uintptr_t result,
                       typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    Backend::log_prob(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                      {pointer<const double>(weight), pointer<const double>(complement)},
                      pointer<const std::int64_t>(targets), pointer<double>(result),
                      Backend::place(where));
  });

  m.def("renyi_divergence", [](ShapeTuple shape, LogitsTuple p_logits, LogitsTuple q_logits,
                               std::uintptr_t p_lse, std::uintptr_t q_lse,
                               std::vector<double> orders, std::uintptr_t forward,
                               std::uintptr_t backward, typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    Backend::renyi_divergence(ensemble_of(shape, p_logits, q_logits, p_lse, q_lse), orders.data(),
                              static_cast<std::int64_t>(orders.size()), pointer<double>(forward),
                              pointer<double>(backward), Backend::place(where));
  });

  m.def("screen", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                     std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t noise,
                     std::uintptr_t active, double weight, double order, double threshold,
                     std::int64_t top_k, std::int64_t num_models, std::uintptr_t divergence,
                     std::uintptr_t passed, typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    const ScreenOptions options{weight,
                                order,
                                threshold,
                                top_k,
                                num_models,
                                pointer<const bool>(active),
                                pointer<const double>(noise)};
    Backend::screen(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                    options, pointer<double>(divergence), pointer<bool>(passed),
                    Backend::place(where));
  });

  m.def("gaussian", [](std::uintptr_t key, std::uint64_t counter, double sigma, std::int64_t count,
                       std::uintptr_t result, typename Backend::Where where) {
    const py::gil_scoped_release nogil;
    Backend::gaussian(key_of(key).data(), counter, sigma, count, pointer<double>(result),
                      Backend::place(where));
  });

  m.def("sample",
        [](std::uintptr_t probabilities, LogitsTuple public_logits, std::int64_t positions,
           std::int64_t vocab, std::uintptr_t key, std::uint64_t counter, std::uintptr_t tokens,
           std::uintptr_t status, typename Backend::Where where) {
          const py::gil_scoped_release nogil;
          Backend::sample(pointer<const double>(probabilities), logits_of(public_logits), positions,
                          vocab, key_of(key).data(), counter, pointer<std::int64_t>(tokens),
                          pointer<std::int32_t>(status), Backend::place(where));
        });
}

// What the CUDA back end has besides: the bytes of its workspaces.
inline void add_workspaces(py::module_ m) {
  m.def("leave_one_out_workspace", [](ShapeTuple shape, std::int64_t num_orders) {
    return cuda::leave_one_out_workspace(shape_of(shape), num_orders);
  });
  m.def("screen_workspace", [](ShapeTuple shape, std::int64_t top_k) {
    return cuda::screen_workspace(shape_of(shape), top_k);
  });
}

}  // namespace adapmixed::bindings
