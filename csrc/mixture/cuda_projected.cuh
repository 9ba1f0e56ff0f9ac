// The projected distributions relative to q, as one thread computes them from the logits.
#pragma once

#include "clip/formula.h"
#include "common/load.cuh"

ADAPMIXED_CORE_BEGIN

// One model at one position.
template <Dtype D>
struct ModelRow {
  const typename Bits<D>::type* logits;
  double shift;               // log p/q = z - z_0 - shift
  double weight, complement;  // 0 and 1 if the slot answers q
  double lower, upper;        // upper > 0: a box, as in Weights (common/operators.h)

  template <class T>
  __device__ Projected<T> projected_from(T t) const {
    return upper > 0.0 ? clipped(t, T(weight), T(complement), T(lower), T(upper))
                       : projected(t, T(weight), T(complement));
  }

  __device__ double log_ratio(std::int64_t v, double z0) const {
    return logit<D>(logits, v) - z0 - shift;
  }
};

template <Dtype D>
__device__ inline ModelRow<D> model_row(const Ensemble& in, const Weights& weights,
                                        std::int64_t model, std::int64_t position) {
  const std::int64_t at = model * in.shape.positions + position;
  const auto* logits = row_bits<D>(in.private_logits, model, position);
  const double shift = in.private_lse[at] - in.public_lse[position];
  if (weights.active != nullptr && !weights.active[at]) return {logits, shift, 0.0, 1.0, 0.0, 0.0};
  return {logits, shift, weights.weight[at], weights.complement[at], weights.lower, weights.upper};
}

template <Dtype D>
__device__ inline Projected<double> projected_at(const ModelRow<D>& row, std::int64_t v,
                                                 double z0) {
  return row.projected_from(row.log_ratio(v, z0));
}

// Returns whether a row has a log-sum-exp and valid weights; NaN fails every comparison.
__device__ inline bool admissible(const Ensemble& in, const Weights& weights, std::int64_t at) {
  const double weight = weights.weight[at], complement = weights.complement[at];
  if (weights.upper > 0.0) {
    return weight > -HUGE_VAL && complement >= weights.lower && complement <= weights.upper &&
           std::fabs(in.private_lse[at]) < HUGE_VAL;
  }
  return weight >= 0.0 && weight <= 1.0 && complement >= 0.0 && complement <= 1.0 &&
         std::fabs(weight + complement - 1.0) <= 1e-9 && std::fabs(in.private_lse[at]) < HUGE_VAL;
}

// The public probability of a token with log q = lq; 0 if the token is wild. A NaN is kept (as
// inf), so that a row which is not a distribution is noticed.
__device__ inline double tame_probability(double lq) { return lq < kWildLogQ ? 0.0 : exp_(lq); }

ADAPMIXED_CORE_END
