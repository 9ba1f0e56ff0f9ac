// One token of the leave-one-out sums, relative to the public distribution, for every back end.
//
// With Y_i = p_bar_i / q and S = sum_i Y_i (absent slots count Y = 1), p = q S / N and
// p' = p (1 + x_i), where
//   add/remove: 1 + x_i = (S - Y_i) N / (S (N - 1)),   zero-out: 1 + x_i = (S - Y_i + 1) / S.
// Both directions sum the excess p((1+x)^s - 1 - s x) for s = alpha and s = 1 - alpha; its linear
// part vanishes in the sum. Templates over T as in common/elementary.h.
#pragma once

#include <cmath>
#include <utility>

#include "common/projected.h"

ADAPMIXED_CORE_BEGIN

template <class T>
using MaskOf = decltype(std::declval<T>() < std::declval<T>());

// The neighbouring mixtures of one call, the same for all tokens.
struct Neighbours {
  double slots, absent;  // N, and how many of these answer q
  bool alone;            // there is one slot, and nothing is left without it
  bool against_public;   // without the model q answers: for it, or because nothing is left
  double largest_order;
};

ADAPMIXED_HD Neighbours neighbours_of(const Shape& shape, const LeaveOneOutOptions& options) {
  Neighbours all{};
  all.slots = static_cast<double>(options.num_models);
  all.absent = all.slots - static_cast<double>(shape.models);
  all.alone = options.num_models == 1;
  all.against_public = options.zero_out || all.alone;
  all.largest_order = 1.0;
  for (std::int64_t k = 0; k < options.num_orders; ++k) {
    all.largest_order = std::fmax(all.largest_order, options.orders[k]);
  }
  return all;
}

// The numbers that all models share at one token.
template <class T>
struct MixtureToken {
  T p;                // the mixture
  T total;            // N p / q
  Projected<T> mean;  // p / q - 1 and p / q
  T scale;            // x per unit of the difference between mean and model
};

// `rare`: the mixture is 0 or near the end of the range of double. Then p = 0 here.
template <class T>
ADAPMIXED_HD_INLINE MixtureToken<T> mixture_token(const Neighbours& all, T q,
                                                  const Projected<T>& mean, MaskOf<T>& rare) {
  const T total = mean.ratio * T(all.slots);
  rare = (q > T(0.0)) & ((mean.ratio < T(1e-280)) | (q * mean.ratio < T(1e-290)));
  return {vselect(rare, T(0.0), q * mean.ratio), total, mean,
          all.against_public ? T(-1.0) / total : T(1.0 / (all.slots - 1.0)) / mean.ratio};
}

// p' of one model at one token: x = p'/p - 1 and X = 1 + x.
template <class T>
struct NeighbourToken {
  T x, X;
};

// `dominated`: one model makes up nearly all of the mixture and S - Y_i cancels. X must then be
// computed from the others' sum by ratio_from_rest. Below that X has ten times the error of S.
template <class T>
ADAPMIXED_HD_INLINE NeighbourToken<T> neighbour_token(const Neighbours& all,
                                                      const MixtureToken<T>& token,
                                                      const Projected<T>& own,
                                                      MaskOf<T>& dominated) {
  T x = own.excess;
  if (!all.against_public) {
    // If p is near q, differences of p_bar / q - 1 are exact; if p << q, differences of p_bar / q
    // are.
    x = vselect(token.mean.ratio >= T(0.5), token.mean.excess - own.excess,
                token.mean.ratio - own.ratio);
  }
  x = x * token.scale;
  dominated = own.ratio > (all.alone ? T(HUGE_VAL) : T(0.9) * token.total);
  return {x, all.alone ? T(1.0) / token.total : x + T(1.0)};
}

// X from the sum of the other models' p_bar / q, including absent slots.
template <class T>
ADAPMIXED_HD_INLINE T ratio_from_rest(const Neighbours& all, T rest, T total) {
  return all.against_public ? (rest + T(1.0)) / total
                            : rest * T(all.slots / (all.slots - 1.0)) / total;
}

// A larger |sum of p_bar_i - q|, or |sum of q - 1|, shows that the projection belongs to other
// rows.
constexpr double kMostBalance = 1e-5;

// D<->_alpha = log1p(max(A, B)) / (alpha - 1). NaN gives +inf, because the loss may not be small.
ADAPMIXED_HD double divergence_from_excess(double forward, double reverse, double order) {
  if (std::isnan(forward) || std::isnan(reverse)) return HUGE_VAL;
  const double excess = std::fmax(std::fmax(forward, reverse), 0.0);
  return std::log1p(excess) / (order - 1.0);
}

ADAPMIXED_CORE_END
