// The Python bindings of one back end's operators. They take addresses, strides and dtypes only:
// Python validates the inputs and allocates the results.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "common/backends.h"

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

// The fields of Weights (common/operators.h): (weight, complement, active or 0, lower, upper).
using WeightsTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, double, double>;

inline Weights weights_of(const WeightsTuple& t) {
  return {pointer<const double>(std::get<0>(t)), pointer<const double>(std::get<1>(t)),
          std::get<3>(t), std::get<4>(t), pointer<const bool>(std::get<2>(t))};
}

// (lower, upper, scale, num_models, active or 0)
using LogPoolTuple = std::tuple<double, double, double, std::int64_t, std::uintptr_t>;

inline LogPoolOptions log_pool_of(const LogPoolTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t),
          pointer<const bool>(std::get<4>(t))};
}

inline std::array<std::uint8_t, 32> key_of(std::uintptr_t address) {
  std::array<std::uint8_t, 32> key{};
  const auto* bytes = pointer<const std::uint8_t>(address);
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = bytes[i];
  return key;
}

// The last argument from Python: the number of threads on a CPU, (device, stream, workspace) on a
// GPU.
template <class Backend>
struct Place;
template <>
struct Place<Cpu> {
  using Given = int;
  static int from(int threads) { return threads; }
};
template <>
struct Place<Cuda> {
  using Given = std::tuple<int, std::uintptr_t, std::uintptr_t>;
  static cuda::Queue from(const Given& place) {
    return {std::get<0>(place), pointer<void>(std::get<1>(place)),
            pointer<void>(std::get<2>(place))};
  }
};

template <class Backend>
void add_operators(py::module_ m) {
  m.def("log_sum_exp", [](ShapeTuple shape, LogitsTuple logits, std::uintptr_t lse,
                          std::uintptr_t status, typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    const Shape s = shape_of(shape);
    Backend::log_sum_exp(logits_of(logits), s.models, s.positions, s.vocab, pointer<double>(lse),
                         pointer<std::int32_t>(status), Place<Backend>::from(place));
  });

  m.def("project", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                      double order, double radius, std::uintptr_t weight, std::uintptr_t complement,
                      std::uintptr_t private_lse, std::uintptr_t status, std::uintptr_t public_lse,
                      std::uintptr_t public_status, typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::project({shape_of(shape), logits_of(private_logits), logits_of(public_logits)}, order,
                     radius,
                     {pointer<double>(weight), pointer<double>(complement),
                      pointer<double>(private_lse), pointer<std::int32_t>(status),
                      pointer<double>(public_lse), pointer<std::int32_t>(public_status)},
                     Place<Backend>::from(place));
  });

  m.def("clip_project",
        [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
           std::uintptr_t public_lse, double lower, double upper, std::vector<double> orders,
           std::int64_t num_models, std::uintptr_t log_scale, std::uintptr_t residual,
           std::uintptr_t charge, std::uintptr_t private_lse, std::uintptr_t status,
           typename Place<Backend>::Given place) {
          const py::gil_scoped_release nogil;
          const ClipOptions options{lower, upper, orders.data(),
                                    static_cast<std::int64_t>(orders.size()), num_models};
          Backend::clip_project(
              {shape_of(shape), logits_of(private_logits), logits_of(public_logits),
               pointer<const double>(public_lse)},
              options,
              {pointer<double>(log_scale), pointer<double>(residual), pointer<double>(charge),
               pointer<double>(private_lse), pointer<std::int32_t>(status)},
              Place<Backend>::from(place));
        });

  m.def("leave_one_out",
        [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
           std::uintptr_t private_lse, std::uintptr_t public_lse, WeightsTuple weights,
           std::vector<double> orders, bool zero_out, std::int64_t num_models, std::uintptr_t loss,
           std::uintptr_t balance, typename Place<Backend>::Given place) {
          const py::gil_scoped_release nogil;
          const LeaveOneOutOptions options{orders.data(), static_cast<std::int64_t>(orders.size()),
                                           zero_out, num_models};
          Backend::leave_one_out(
              ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
              weights_of(weights), options, pointer<double>(loss), pointer<double>(balance),
              Place<Backend>::from(place));
        });

  m.def("mixture", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                      std::uintptr_t private_lse, std::uintptr_t public_lse, WeightsTuple weights,
                      std::uintptr_t probabilities, typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::mixture(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                     weights_of(weights), pointer<double>(probabilities),
                     Place<Backend>::from(place));
  });

  m.def("log_prob", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                       std::uintptr_t private_lse, std::uintptr_t public_lse, WeightsTuple weights,
                       std::uintptr_t targets, std::uintptr_t result,
                       typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::log_prob(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                      weights_of(weights), pointer<const std::int64_t>(targets),
                      pointer<double>(result), Place<Backend>::from(place));
  });

  m.def("log_pool",
        [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
           std::uintptr_t differences, LogPoolTuple options, std::uintptr_t log_normaliser,
           std::uintptr_t span, std::uintptr_t private_lse, std::uintptr_t status,
           std::uintptr_t public_lse, std::uintptr_t public_status, std::uintptr_t log_weights,
           typename Place<Backend>::Given place) {
          const py::gil_scoped_release nogil;
          Backend::log_pool(
              {shape_of(shape), logits_of(private_logits), logits_of(public_logits),
               pointer<const double>(differences)},
              log_pool_of(options),
              {pointer<double>(log_normaliser), pointer<double>(span), pointer<double>(private_lse),
               pointer<std::int32_t>(status), pointer<double>(public_lse),
               pointer<std::int32_t>(public_status), pointer<double>(log_weights)},
              Place<Backend>::from(place));
        });

  m.def("pool_mixture", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                           std::uintptr_t private_lse, std::uintptr_t public_lse,
                           LogPoolTuple options, std::uintptr_t log_normaliser,
                           std::uintptr_t probabilities, typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::pool_mixture(
        ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
        log_pool_of(options), pointer<const double>(log_normaliser), pointer<double>(probabilities),
        Place<Backend>::from(place));
  });

  m.def("pool_probabilities",
        [](std::uintptr_t log_weights, std::uintptr_t log_normaliser, std::int64_t positions,
           std::int64_t vocab, std::uintptr_t probabilities, typename Place<Backend>::Given place) {
          const py::gil_scoped_release nogil;
          Backend::pool_probabilities(pointer<const double>(log_weights),
                                      pointer<const double>(log_normaliser), positions, vocab,
                                      pointer<double>(probabilities), Place<Backend>::from(place));
        });

  m.def("pool_log_prob", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                            std::uintptr_t private_lse, std::uintptr_t public_lse,
                            LogPoolTuple options, std::uintptr_t log_normaliser,
                            std::uintptr_t targets, std::uintptr_t result,
                            typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::pool_log_prob(
        ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
        log_pool_of(options), pointer<const double>(log_normaliser),
        pointer<const std::int64_t>(targets), pointer<double>(result), Place<Backend>::from(place));
  });

  m.def("add_low_rank",
        [](ShapeTuple shape, LogitsTuple start, std::uintptr_t coefficients, std::uintptr_t factors,
           int dtype, std::uintptr_t tokens, std::int64_t rank, std::int64_t vocab,
           LogitsTuple result, typename Place<Backend>::Given place) {
          const py::gil_scoped_release nogil;
          const auto [start_data, start_model, start_position, of_start] = start;
          const auto [data, stride_model, stride_position, of_result] = result;
          Backend::add_low_rank(
              {shape_of(shape), pointer<const float>(start_data), start_model, start_position,
               pointer<const float>(coefficients), pointer<const void>(factors),
               static_cast<Dtype>(dtype), pointer<const std::int64_t>(tokens), rank, vocab},
              {pointer<float>(data), stride_model, stride_position}, Place<Backend>::from(place));
        });

  m.def("renyi_divergence", [](ShapeTuple shape, LogitsTuple p_logits, LogitsTuple q_logits,
                               std::uintptr_t p_lse, std::uintptr_t q_lse,
                               std::vector<double> orders, std::uintptr_t forward,
                               std::uintptr_t backward, typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::renyi_divergence(ensemble_of(shape, p_logits, q_logits, p_lse, q_lse), orders.data(),
                              static_cast<std::int64_t>(orders.size()), pointer<double>(forward),
                              pointer<double>(backward), Place<Backend>::from(place));
  });

  m.def("screen", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                     std::uintptr_t private_lse, std::uintptr_t public_lse, std::uintptr_t noise,
                     std::uintptr_t tokens, std::uintptr_t active, double weight, double order,
                     double threshold, std::int64_t top_k, std::int64_t num_models,
                     std::uintptr_t log_ratios, std::uintptr_t divergence, std::uintptr_t passed,
                     typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    const ScreenOptions options{weight,
                                order,
                                threshold,
                                top_k,
                                num_models,
                                pointer<const bool>(active),
                                pointer<const double>(noise),
                                pointer<const std::int64_t>(tokens),
                                pointer<double>(log_ratios)};
    Backend::screen(ensemble_of(shape, private_logits, public_logits, private_lse, public_lse),
                    options, pointer<double>(divergence), pointer<bool>(passed),
                    Place<Backend>::from(place));
  });

  m.def("gaussian", [](std::uintptr_t key, std::uint64_t counter, double sigma, std::int64_t count,
                       std::uintptr_t result, typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::gaussian(key_of(key).data(), counter, sigma, count, pointer<double>(result),
                      Place<Backend>::from(place));
  });

  m.def("sample",
        [](std::uintptr_t probabilities, LogitsTuple public_logits, std::int64_t positions,
           std::int64_t vocab, std::uintptr_t key, std::uint64_t counter, std::uintptr_t tokens,
           std::uintptr_t status, typename Place<Backend>::Given place) {
          const py::gil_scoped_release nogil;
          Backend::sample(pointer<const double>(probabilities), logits_of(public_logits), positions,
                          vocab, key_of(key).data(), counter, pointer<std::int64_t>(tokens),
                          pointer<std::int32_t>(status), Place<Backend>::from(place));
        });
}

// Functions of the CUDA back end alone: the sizes of its workspaces in bytes.
inline void add_of_cuda(py::module_ m) {
  m.def("log_sum_exp_workspace",
        [](ShapeTuple shape) { return cuda::log_sum_exp_workspace(shape_of(shape)); });
  m.def("mixture_workspace",
        [](ShapeTuple shape) { return cuda::mixture_workspace(shape_of(shape)); });
  m.def("sample_workspace", cuda::sample_workspace);
  m.def("clip_project_workspace",
        [](ShapeTuple shape) { return cuda::clip_project_workspace(shape_of(shape)); });
  m.def("project_workspace",
        [](ShapeTuple shape) { return cuda::project_workspace(shape_of(shape)); });
  m.def("leave_one_out_workspace", [](ShapeTuple shape, std::int64_t num_orders) {
    return cuda::leave_one_out_workspace(shape_of(shape), num_orders);
  });
  m.def("log_pool_workspace",
        [](ShapeTuple shape) { return cuda::log_pool_workspace(shape_of(shape)); });
}

}  // namespace adapmixed::bindings
