// Several vectors side by side, or several floats of a GPU's thread. Each operation runs on all of
// them before the next begins, so that their latencies overlap. Separate chains of multiply-adds,
// one after the other, would not overlap.
#pragma once

#include "common/float_ratio.h"

ADAPMIXED_CORE_BEGIN

template <class V, int kWays>
struct Several {
  static constexpr int kSize = kWays;
  static constexpr std::int64_t kLanes = kWays * V::kLanes;
  V v[kWays];

  Several() = default;
  ADAPMIXED_HD explicit Several(double x) : Several(V(x)) {}
  ADAPMIXED_HD explicit Several(V x) {
    ADAPMIXED_UNROLL
    for (int k = 0; k < kWays; ++k) v[k] = x;
  }
  template <class Scalar>
  static Several load(const Scalar* p) {
    Several s;
    ADAPMIXED_UNROLL
    for (int k = 0; k < kWays; ++k) s.v[k] = V::load(p + k * V::kLanes);
    return s;
  }
};

template <class V, int kWays>
struct SeveralMask {
  decltype(V() > V()) v[kWays];
};

#define ADAPMIXED_EACH(Result, name, arguments, of_each) \
  ADAPMIXED_HD_CALLBACK                                  \
  template <class V, int kWays>                          \
  ADAPMIXED_HD_INLINE Result<V, kWays> name arguments {  \
    Result<V, kWays> s;                                  \
    ADAPMIXED_UNROLL                                     \
    for (int k = 0; k < kWays; ++k) s.v[k] = of_each;    \
    return s;                                            \
  }
// By reference, project's kernel takes a register more; by value, the CPU's chains take a third
// longer.
#if defined(__CUDACC__)
#define ADAPMIXED_MANY Several<V, kWays>
#else
#define ADAPMIXED_MANY const Several<V, kWays>&
#endif
ADAPMIXED_EACH(Several, operator+, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), a.v[k] + b.v[k])
ADAPMIXED_EACH(Several, operator-, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), a.v[k] - b.v[k])
ADAPMIXED_EACH(Several, operator*, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), a.v[k] * b.v[k])
ADAPMIXED_EACH(SeveralMask, operator>, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), a.v[k] > b.v[k])
ADAPMIXED_EACH(Several, reciprocal, (ADAPMIXED_MANY a), reciprocal(a.v[k]))
ADAPMIXED_EACH(Several, add_exponent, (ADAPMIXED_MANY a, ADAPMIXED_MANY shifted),
               add_exponent(a.v[k], shifted.v[k]))
ADAPMIXED_EACH(Several, vfma, (ADAPMIXED_MANY a, ADAPMIXED_MANY b, ADAPMIXED_MANY c),
               vfma(a.v[k], b.v[k], c.v[k]))
ADAPMIXED_EACH(Several, vfms, (ADAPMIXED_MANY a, ADAPMIXED_MANY b, ADAPMIXED_MANY c),
               vfms(a.v[k], b.v[k], c.v[k]))
ADAPMIXED_EACH(Several, vmax, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), vmax(a.v[k], b.v[k]))
ADAPMIXED_EACH(Several, vabs, (ADAPMIXED_MANY a), vabs(a.v[k]))
ADAPMIXED_EACH(Several, exp2_integer, (ADAPMIXED_MANY a), exp2_integer(a.v[k]))
ADAPMIXED_EACH(Several, vselect, (SeveralMask<V, kWays> m, ADAPMIXED_MANY a, ADAPMIXED_MANY b),
               vselect(m.v[k], a.v[k], b.v[k]))
#undef ADAPMIXED_EACH
#undef ADAPMIXED_MANY
template <class V, int kWays>
ADAPMIXED_HD_INLINE void vsplit(const Several<V, kWays>& a, Several<V, kWays>& e,
                                Several<V, kWays>& m) {
  ADAPMIXED_UNROLL
  for (int k = 0; k < kWays; ++k) vsplit(a.v[k], e.v[k], m.v[k]);
}

ADAPMIXED_CORE_END
