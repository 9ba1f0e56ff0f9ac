// The Python bindings of one back end's operators. They take addresses, strides and dtypes only:
// Python validates the inputs and allocates the results.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <tuple>
#include <type_traits>

#include "common/operators.h"

namespace adapmixed::bindings {

namespace py = pybind11;

// What Python gives for an argument: a number for a number, an address for a pointer, and a tuple
// of its fields for a struct of common/operators.h.
template <class T>
struct Given {
  using type = T;
  static T from(T value) { return value; }
};
template <class T>
struct Given<T*> {
  using type = std::uintptr_t;
  static T* from(type address) { return reinterpret_cast<T*>(address); }
};
template <>
struct Given<Dtype> {
  using type = int;
  static Dtype from(int code) { return static_cast<Dtype>(code); }
};
template <class T, class... Field>
struct Fields {
  using type = std::tuple<typename Given<Field>::type...>;
  static T from(const type& fields) {
    return std::apply([](const auto&... field) { return T{Given<Field>::from(field)...}; }, fields);
  }
};

using Number = std::int64_t;
using Doubles = double*;
using Read = const double*;
using Statuses = std::int32_t*;
template <>
struct Given<Shape> : Fields<Shape, Number, Number, Number> {};
template <>
struct Given<Logits> : Fields<Logits, const void*, Number, Number, Dtype> {};
template <>
struct Given<Ensemble> : Fields<Ensemble, Shape, Logits, Logits, Read, Read> {};
template <>
struct Given<Weights> : Fields<Weights, Read, Read, double, double, const bool*> {};
template <>
struct Given<ProjectInputs> : Fields<ProjectInputs, Shape, Logits, Logits> {};
template <>
struct Given<ProjectResults>
    : Fields<ProjectResults, Doubles, Doubles, Statuses, Doubles, Statuses> {};
template <>
struct Given<ClipInputs> : Fields<ClipInputs, Shape, Logits, Logits, Read> {};
template <>
struct Given<ClipOptions> : Fields<ClipOptions, double, double, Read, Number, Number> {};
template <>
struct Given<ClipResults> : Fields<ClipResults, Doubles, Doubles, Doubles, Doubles, Statuses> {};
template <>
struct Given<LeaveOneOutOptions> : Fields<LeaveOneOutOptions, Read, Number, bool, Number> {};
template <>
struct Given<ScreenOptions> : Fields<ScreenOptions, double, double, double, Number, Number,
                                     const bool*, Read, const Number*, Doubles> {};
template <>
struct Given<LogPoolInputs> : Fields<LogPoolInputs, Shape, Logits, Logits, Read> {};
template <>
struct Given<LogPoolOptions> : Fields<LogPoolOptions, double, double, double, Number, const bool*> {
};
template <>
struct Given<LogPoolResults>
    : Fields<LogPoolResults, Doubles, Doubles, Doubles, Statuses, Doubles, Statuses, Doubles> {};
template <>
struct Given<LowRankInputs>
    : Fields<LowRankInputs, Shape, const float*, Number, Number, const float*, const void*, Dtype,
             const Number*, Number, Number> {};
template <>
struct Given<LowRankResults> : Fields<LowRankResults, float*, Number, Number> {};
template <>
struct Given<CrossEntropyInputs> : Fields<CrossEntropyInputs, Number, Number, Number, const float*,
                                          Number, const float*, const float*, const Number*> {};
template <>
struct Given<CrossEntropyResults> : Fields<CrossEntropyResults, Doubles, float*, float*> {};
template <>
struct Given<cuda::Queue> : Fields<cuda::Queue, int, void*, void*> {};

// Adds one function of a back end to a module. Each call asks for the table: the CPU's may change.
template <class Table, class Of, class Result, class... A>
void bind(py::module_& m, const char* name, const Table& (*table)(), Result (*Of::*member)(A...)) {
  m.def(name, [=](typename Given<std::decay_t<A>>::type... given) {
    const py::gil_scoped_release nogil;
    return (table().*member)(Given<std::decay_t<A>>::from(given)...);
  });
}
#define ADAPMIXED_BIND(name) bind(m, #name, table, &Table::name)

template <class Table>
void add_operators(py::module_ m, const Table& (*table)()) {
  ADAPMIXED_BIND(log_sum_exp);
  ADAPMIXED_BIND(project);
  ADAPMIXED_BIND(clip_project);
  ADAPMIXED_BIND(leave_one_out);
  ADAPMIXED_BIND(mixture);
  ADAPMIXED_BIND(log_prob);
  ADAPMIXED_BIND(log_pool);
  ADAPMIXED_BIND(add_low_rank);
  ADAPMIXED_BIND(renyi_divergence);
  ADAPMIXED_BIND(screen);
  ADAPMIXED_BIND(gaussian);
  ADAPMIXED_BIND(sample);
}

inline void add_of_cpu(py::module_ m) {
  using cpu::Table, cpu::table;
  add_operators<Table>(m, table);
  ADAPMIXED_BIND(near_log_sum_exp);
  ADAPMIXED_BIND(cross_entropy);
}

inline void add_of_cuda(py::module_ m) {
  using cuda::Table, cuda::table;
  add_operators<Table>(m, table);
  ADAPMIXED_BIND(log_sum_exp_workspace);
  ADAPMIXED_BIND(project_workspace);
  ADAPMIXED_BIND(clip_project_workspace);
  ADAPMIXED_BIND(leave_one_out_workspace);
  ADAPMIXED_BIND(mixture_workspace);
  ADAPMIXED_BIND(log_pool_workspace);
  ADAPMIXED_BIND(sample_workspace);
}

}  // namespace adapmixed::bindings
