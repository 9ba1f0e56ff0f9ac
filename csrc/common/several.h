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
#undef ADAPMIXED_EACH
#undef ADAPMIXED_MANY

using Quad = Several<Flt, 4>;

ADAPMIXED_CORE_END
