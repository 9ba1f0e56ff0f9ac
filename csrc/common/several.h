// Several vectors side by side. Each operation runs on all of them before the next begins, so that
// their latencies overlap. Separate chains of multiply-adds, one after the other, would not
// overlap.
#pragma once

#include "common/simd_float.h"

ADAPMIXED_CORE_BEGIN

template <class V, int kWays>
struct Several {
  static constexpr int kSize = kWays;
  static constexpr std::int64_t kLanes = kWays * V::kLanes;
  V v[kWays];

  Several() = default;
  explicit Several(double x) : Several(V(static_cast<typename V::Scalar>(x))) {}
  explicit Several(V x) {
    ADAPMIXED_UNROLL
    for (int k = 0; k < kWays; ++k) v[k] = x;
  }
  static Several load(const typename V::Scalar* p) {
    Several s;
    ADAPMIXED_UNROLL
    for (int k = 0; k < kWays; ++k) s.v[k] = V::load(p + k * V::kLanes);
    return s;
  }
};

template <class V, int kWays>
struct SeveralMask {
  decltype(V() > V()) m[kWays];
};

#define ADAPMIXED_EACH(name, result, arguments, of_each)     \
  template <class V, int kWays>                              \
  ADAPMIXED_INLINE inline Several<V, kWays> name arguments { \
    Several<V, kWays> result;                                \
    ADAPMIXED_UNROLL                                         \
    for (int k = 0; k < kWays; ++k) of_each;                 \
    return result;                                           \
  }
#define ADAPMIXED_MANY const Several<V, kWays>&
ADAPMIXED_EACH(operator+, s, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), s.v[k] = a.v[k] + b.v[k])
ADAPMIXED_EACH(operator-, s, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), s.v[k] = a.v[k] - b.v[k])
ADAPMIXED_EACH(operator*, s, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), s.v[k] = a.v[k] * b.v[k])
ADAPMIXED_EACH(reciprocal, s, (ADAPMIXED_MANY a), s.v[k] = reciprocal(a.v[k]))
ADAPMIXED_EACH(add_exponent, s, (ADAPMIXED_MANY a, ADAPMIXED_MANY shifted),
               s.v[k] = add_exponent(a.v[k], shifted.v[k]))
ADAPMIXED_EACH(vfma, s, (ADAPMIXED_MANY a, ADAPMIXED_MANY b, ADAPMIXED_MANY c),
               s.v[k] = vfma(a.v[k], b.v[k], c.v[k]))
ADAPMIXED_EACH(vfms, s, (ADAPMIXED_MANY a, ADAPMIXED_MANY b, ADAPMIXED_MANY c),
               s.v[k] = vfms(a.v[k], b.v[k], c.v[k]))
ADAPMIXED_EACH(vmax, s, (ADAPMIXED_MANY a, ADAPMIXED_MANY b), s.v[k] = vmax(a.v[k], b.v[k]))
ADAPMIXED_EACH(vabs, s, (ADAPMIXED_MANY a), s.v[k] = vabs(a.v[k]))
ADAPMIXED_EACH(exp2_integer, s, (ADAPMIXED_MANY a), s.v[k] = exp2_integer(a.v[k]))
ADAPMIXED_EACH(vselect, s, (const SeveralMask<V, kWays>& m, ADAPMIXED_MANY a, ADAPMIXED_MANY b),
               s.v[k] = vselect(m.m[k], a.v[k], b.v[k]))
#undef ADAPMIXED_EACH
#undef ADAPMIXED_MANY
template <class V, int kWays>
ADAPMIXED_INLINE inline SeveralMask<V, kWays> operator>(const Several<V, kWays>& a,
                                                        const Several<V, kWays>& b) {
  SeveralMask<V, kWays> s;
  ADAPMIXED_UNROLL
  for (int k = 0; k < kWays; ++k) s.m[k] = a.v[k] > b.v[k];
  return s;
}
template <class V, int kWays>
ADAPMIXED_INLINE inline void vsplit(const Several<V, kWays>& a, Several<V, kWays>& e,
                                    Several<V, kWays>& m) {
  ADAPMIXED_UNROLL
  for (int k = 0; k < kWays; ++k) vsplit(a.v[k], e.v[k], m.v[k]);
}

using Quad = Several<Flt, 4>;

ADAPMIXED_CORE_END
