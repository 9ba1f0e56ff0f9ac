// One token of one projected distribution relative to q: shared by clipping, mixtures and losses.
#pragma once

#include <cstdint>

#include "common/elementary.h"
#include "common/operators.h"

ADAPMIXED_CORE_BEGIN

// The part of q in a model's answer: see Weights.
ADAPMIXED_HD double rest_of(const Weights& weights, std::int64_t at) {
  return weights.upper > 0.0 ? weights.residual[at] : 1.0 - weights.weight[at];
}

// p_bar / q - 1 = lambda d and p_bar / q = 1 - lambda + lambda r, or means of these. Both are kept
// because each is accurate where the other cancels.
template <class T>
struct Projected {
  T excess, ratio;
};

// t = log p/q.
template <class T>
ADAPMIXED_HD_INLINE Projected<T> projected(T t, T weight, T rest) {
  const Ratio<T> r = ratio(t);
  return {weight * r.d, vfma(weight, r.r, rest)};
}

ADAPMIXED_CORE_END
