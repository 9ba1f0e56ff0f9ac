// Four doubles of one thread, with the operations that core/ asks of its element type: independent
// work between which a thread need not wait, and one loop over the bits of an order for all four.
#pragma once

#include "core/elementary.h"
#include "cuda/runtime.h"

ADAPMIXED_CORE_BEGIN

struct QuadMask {
  bool v[4];
  ADAPMIXED_HD bool any() const { return v[0] || v[1] || v[2] || v[3]; }
};

struct Quad {
  static constexpr int kLanes = 4;
  double v[kLanes];
  Quad() = default;
  ADAPMIXED_HD explicit Quad(double x) : v{x, x, x, x} {}
};

#define ADAPMIXED_LANES(result, signature, expression)            \
  ADAPMIXED_HD_INLINE result signature {                          \
    result r;                                                     \
    for (int k = 0; k < Quad::kLanes; ++k) r.v[k] = (expression); \
    return r;                                                     \
  }

ADAPMIXED_LANES(QuadMask, operator&(QuadMask a, QuadMask b), a.v[k] && b.v[k])
ADAPMIXED_LANES(QuadMask, operator|(QuadMask a, QuadMask b), a.v[k] || b.v[k])
ADAPMIXED_LANES(QuadMask, operator<(Quad a, Quad b), a.v[k] < b.v[k])
ADAPMIXED_LANES(QuadMask, operator>(Quad a, Quad b), a.v[k] > b.v[k])
ADAPMIXED_LANES(QuadMask, operator>=(Quad a, Quad b), a.v[k] >= b.v[k])
ADAPMIXED_LANES(QuadMask, operator==(Quad a, Quad b), a.v[k] == b.v[k])
ADAPMIXED_LANES(Quad, operator+(Quad a, Quad b), a.v[k] + b.v[k])
ADAPMIXED_LANES(Quad, operator-(Quad a, Quad b), a.v[k] - b.v[k])
ADAPMIXED_LANES(Quad, operator*(Quad a, Quad b), a.v[k] * b.v[k])
ADAPMIXED_LANES(Quad, operator/(Quad a, Quad b), a.v[k] / b.v[k])
ADAPMIXED_LANES(Quad, vfma(Quad a, Quad b, Quad c), vfma(a.v[k], b.v[k], c.v[k]))
ADAPMIXED_LANES(Quad, vmin(Quad a, Quad b), vmin(a.v[k], b.v[k]))
ADAPMIXED_LANES(Quad, vmax(Quad a, Quad b), vmax(a.v[k], b.v[k]))
ADAPMIXED_LANES(Quad, vabs(Quad a), vabs(a.v[k]))
ADAPMIXED_LANES(Quad, vround(Quad a), vround(a.v[k]))
ADAPMIXED_LANES(Quad, vselect(QuadMask m, Quad a, Quad b), m.v[k] ? a.v[k] : b.v[k])
ADAPMIXED_LANES(Quad, vldexp(Quad a, Quad n), vldexp(a.v[k], n.v[k]))

#undef ADAPMIXED_LANES

ADAPMIXED_HD_INLINE void vsplit(Quad a, Quad& e, Quad& m) {
  for (int k = 0; k < Quad::kLanes; ++k) vsplit(a.v[k], e.v[k], m.v[k]);
}

// The lanes in a fixed order.
ADAPMIXED_HD_INLINE double sum(Quad a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }

ADAPMIXED_CORE_END
