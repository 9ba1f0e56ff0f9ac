// The logarithmic pool of one back end as Python sees it; see bindings.h.
#pragma once

#include "bindings.h"

namespace adapmixed::bindings {

// (lower, upper, scale, num_models, active)
using LogPoolTuple = std::tuple<double, double, double, std::int64_t, std::uintptr_t>;

inline LogPoolOptions log_pool_of(const LogPoolTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t),
          pointer<const bool>(std::get<4>(t))};
}

template <class Backend>
void add_log_pool(py::module_ m) {
  m.def("log_pool", [](ShapeTuple shape, LogitsTuple private_logits, LogitsTuple public_logits,
                       LogPoolTuple options, std::uintptr_t log_normaliser, std::uintptr_t span,
                       std::uintptr_t private_lse, std::uintptr_t status, std::uintptr_t public_lse,
                       std::uintptr_t public_status, typename Place<Backend>::Given place) {
    const py::gil_scoped_release nogil;
    Backend::log_pool({shape_of(shape), logits_of(private_logits), logits_of(public_logits)},
                      log_pool_of(options),
                      {pointer<double>(log_normaliser), pointer<double>(span),
                       pointer<double>(private_lse), pointer<std::int32_t>(status),
                       pointer<double>(public_lse), pointer<std::int32_t>(public_status)},
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
}

}  // namespace adapmixed::bindings
