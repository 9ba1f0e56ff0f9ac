// One function with the arguments of log_pool, in three bindings: bindings.py compiles and times
// them. It does next to nothing, so that a call's time is the binding's.
#include <cstdint>

namespace {

using Address = std::uintptr_t;
using Size = std::int64_t;

// Every argument counts with a weight of its own, so that no two can be exchanged unnoticed.
double weigh(Size models, Size positions, Size vocab, Address private_data, Size private_model,
             Size private_position, int private_dtype, Address public_data, Size public_model,
             Size public_position, int public_dtype, double lower, double upper, double scale,
             Size num_models, Address active, Address normaliser, Address span, Address private_lse,
             Address status, Address public_lse, Address public_status, int threads) {
  const double values[] = {double(models),
                           double(positions),
                           double(vocab),
                           double(private_data),
                           double(private_model),
                           double(private_position),
                           double(private_dtype),
                           double(public_data),
                           double(public_model),
                           double(public_position),
                           double(public_dtype),
                           lower,
                           upper,
                           scale,
                           double(num_models),
                           double(active),
                           double(normaliser),
                           double(span),
                           double(private_lse),
                           double(status),
                           double(public_lse),
                           double(public_status),
                           double(threads)};
  double sum = 0;
  int weight = 0;
  for (const double value : values) sum += ++weight * value;
  return sum;
}

}  // namespace

#if defined(WITH_PYBIND11)
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

namespace py = pybind11;

PYBIND11_MODULE(with_pybind11, m) {
  using Shape = std::tuple<Size, Size, Size>;
  using Logits = std::tuple<Address, Size, Size, int>;
  using Options = std::tuple<double, double, double, Size, Address>;
  // Grouped as csrc/bindings.h groups them.
  m.def("grouped", [](Shape shape, Logits p, Logits q, Options options, Address normaliser,
                      Address span, Address private_lse, Address status, Address public_lse,
                      Address public_status, int threads) {
    const py::gil_scoped_release nogil;
    const auto [models, positions, vocab] = shape;
    const auto [lower, upper, scale, num_models, active] = options;
    return weigh(models, positions, vocab, std::get<0>(p), std::get<1>(p), std::get<2>(p),
                 std::get<3>(p), std::get<0>(q), std::get<1>(q), std::get<2>(q), std::get<3>(q),
                 lower, upper, scale, num_models, active, normaliser, span, private_lse, status,
                 public_lse, public_status, threads);
  });
  m.def("flat", &weigh, py::call_guard<py::gil_scoped_release>());
}

#elif defined(WITH_LIMITED_API)
#include <Python.h>

namespace {

PyObject* flat(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 23) {
    PyErr_Format(PyExc_TypeError, "flat takes 23 arguments, got %zd", count);
    return nullptr;
  }
  Size whole[23] = {};
  double real[23] = {};
  for (int at = 0; at < 23; ++at) {
    if (at >= 11 && at < 14) {
      real[at] = PyFloat_AsDouble(given[at]);
    } else {
      whole[at] = PyLong_AsLongLong(given[at]);
    }
    if ((real[at] == -1.0 || whole[at] == -1) && PyErr_Occurred()) return nullptr;
  }
  double sum;
  Py_BEGIN_ALLOW_THREADS;
  sum = weigh(whole[0], whole[1], whole[2], Address(whole[3]), whole[4], whole[5], int(whole[6]),
              Address(whole[7]), whole[8], whole[9], int(whole[10]), real[11], real[12], real[13],
              whole[14], Address(whole[15]), Address(whole[16]), Address(whole[17]),
              Address(whole[18]), Address(whole[19]), Address(whole[20]), Address(whole[21]),
              int(whole[22]));
  Py_END_ALLOW_THREADS;
  return PyFloat_FromDouble(sum);
}

PyMethodDef methods[] = {{"flat", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(flat)),
                          METH_FASTCALL, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "with_limited_api",
                          nullptr,
                          -1,
                          methods,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_with_limited_api() { return PyModule_Create(&definition); }

#else  // a plain C interface, for ctypes

extern "C" double flat(Size models, Size positions, Size vocab, Address private_data,
                       Size private_model, Size private_position, int private_dtype,
                       Address public_data, Size public_model, Size public_position,
                       int public_dtype, double lower, double upper, double scale, Size num_models,
                       Address active, Address normaliser, Address span, Address private_lse,
                       Address status, Address public_lse, Address public_status, int threads) {
  return weigh(models, positions, vocab, private_data, private_model, private_position,
               private_dtype, public_data, public_model, public_position, public_dtype, lower,
               upper, scale, num_models, active, normaliser, span, private_lse, status, public_lse,
               public_status, threads);
}
#endif
