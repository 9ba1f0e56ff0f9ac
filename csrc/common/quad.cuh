// Four numbers of one thread, with the operations that the mathematics needs of its element type.
// The four are independent, so their latencies overlap, and they share one loop over the bits of an
// order.
#pragma once

#include "common/elementary.h"
#include "common/runtime.cuh"

ADAPMIXED_CORE_BEGIN

struct QuadMask {
  bool v[4];
  ADAPMIXED_HD bool any() const { return v[0] || v[1] || v[2] || v[3]; }
};

template <class F>
struct QuadOf {
  static constexpr int kLanes = 4;
  F v[kLanes];
  QuadOf() = default;
  ADAPMIXED_HD explicit QuadOf(double x) {
    for (int k = 0; k < kLanes; ++k) v[k] = static_cast<F>(x);
  }
};
using Quad = QuadOf<double>;
using FloatQuad = QuadOf<float>;

#define ADAPMIXED_LANES(result, signature, expression)        \
  template <class F>                                          \
  ADAPMIXED_HD_INLINE result signature {                      \
    result r;                                                 \
    for (int k = 0; k < a.kLanes; ++k) r.v[k] = (expression); \
    return r;                                                 \
  }
#define ADAPMIXED_MASK(op, expression) \
  ADAPMIXED_LANES(QuadMask, operator op(QuadOf<F> a, QuadOf<F> b), expression)
#define ADAPMIXED_QUAD(signature, expression) ADAPMIXED_LANES(QuadOf<F>, signature, expression)

ADAPMIXED_HD_INLINE QuadMask operator&(QuadMask a, QuadMask b) {
  for (int k = 0; k < Quad::kLanes; ++k) a.v[k] = a.v[k] && b.v[k];
  return a;
}
ADAPMIXED_HD_INLINE QuadMask operator|(QuadMask a, QuadMask b) {
  for (int k = 0; k < Quad::kLanes; ++k) a.v[k] = a.v[k] || b.v[k];
  return a;
}
ADAPMIXED_MASK(<, a.v[k] < b.v[k])
ADAPMIXED_MASK(>, a.v[k] > b.v[k])
ADAPMIXED_MASK(>=, a.v[k] >= b.v[k])
ADAPMIXED_MASK(==, a.v[k] == b.v[k])
ADAPMIXED_QUAD(operator+(QuadOf<F> a, QuadOf<F> b), a.v[k] + b.v[k])
ADAPMIXED_QUAD(operator-(QuadOf<F> a, QuadOf<F> b), a.v[k] - b.v[k])
ADAPMIXED_QUAD(operator*(QuadOf<F> a, QuadOf<F> b), a.v[k] * b.v[k])
ADAPMIXED_QUAD(operator/(QuadOf<F> a, QuadOf<F> b), a.v[k] / b.v[k])
ADAPMIXED_QUAD(vfma(QuadOf<F> a, QuadOf<F> b, QuadOf<F> c), vfma(a.v[k], b.v[k], c.v[k]))
ADAPMIXED_QUAD(vmin(QuadOf<F> a, QuadOf<F> b), vmin(a.v[k], b.v[k]))
ADAPMIXED_QUAD(vmax(QuadOf<F> a, QuadOf<F> b), vmax(a.v[k], b.v[k]))
ADAPMIXED_QUAD(vabs(QuadOf<F> a), vabs(a.v[k]))
ADAPMIXED_QUAD(vround(QuadOf<F> a), vround(a.v[k]))
ADAPMIXED_QUAD(vldexp(QuadOf<F> a, QuadOf<F> n), vldexp(a.v[k], n.v[k]))

#undef ADAPMIXED_QUAD
#undef ADAPMIXED_MASK
#undef ADAPMIXED_LANES

template <class F>
ADAPMIXED_HD_INLINE QuadOf<F> vselect(QuadMask m, QuadOf<F> a, QuadOf<F> b) {
  for (int k = 0; k < a.kLanes; ++k) a.v[k] = m.v[k] ? a.v[k] : b.v[k];
  return a;
}

ADAPMIXED_HD_INLINE void vsplit(Quad a, Quad& e, Quad& m) {
  for (int k = 0; k < Quad::kLanes; ++k) vsplit(a.v[k], e.v[k], m.v[k]);
}

// Adds the lanes in a fixed order.
template <class F>
ADAPMIXED_HD_INLINE F sum(QuadOf<F> a) {
  return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
}

ADAPMIXED_CORE_END
