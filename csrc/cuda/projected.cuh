// The projected distributions relative to q, as one thread computes them from the logits.
#pragma once

#include "core/neighbour.h"
#include "cuda/load.cuh"

ADAPMIXED_CORE_BEGIN

// One model at one position.
template <Dtype D>
struct ModelRow {
  const typename Bits<D>::type* logits;
  double shift;  // log p/q = z - z_0 - shift
  double weight, complement;

  __device__ double log_ratio(std::int64_t v, double z0) const {
    return logit<D>(logits, v) - z0 - shift;
  }
};

template <Dtype D>
__device__ inline ModelRow<D> model_row(const Ensemble& in, const Weights& weights,
                                        std::int64_t model, std::int64_t position) {
  const std::int64_t at = model * in.shape.positions + position;
  return {row_bits<D>(in.private_logits, model, position),
          in.private_lse[at] - in.public_lse[position], weights.weight[at], weights.complement[at]};
}

template <Dtype D>
__device__ inline Projected<double> projected_at(const ModelRow<D>& row, std::int64_t v,
                                                 double z0) {
  return projected(row.log_ratio(v, z0), row.weight, row.complement);
}

// Whether a row has a distribution and its weights are weights; NaN fails every comparison.
__device__ inline bool admissible(const Ensemble& in, const Weights& weights, std::int64_t at) {
  const double weight = weights.weight[at], complement = weights.complement[at];
  return weight >= 0.0 && weight <= 1.0 && complement >= 0.0 && complement <= 1.0 &&
         std::fabs(weight + complement - 1.0) <= 1e-9 && std::fabs(in.private_lse[at]) < HUGE_VAL;
}

// The public probability of a token by log q = lq; 0 where it is wild. A NaN is kept (as inf), so
// that what belongs to no distribution is noticed.
__device__ inline double tame_probability(double lq) { return lq < kWildLogQ ? 0.0 : exp_(lq); }

// The mean over the models present at a token that is not wild.
template <Dtype D>
__device__ Projected<double> mean_projected(const Ensemble& in, const Weights& weights,
                                            std::int64_t position, std::int64_t v, double z0) {
  Projected<double> first{}, differences{0.0, 0.0};
  for (std::int64_t i = 0; i < in.shape.models; ++i) {
    const Projected<double> own = projected_at(model_row<D>(in, weights, i, position), v, z0);
    if (i == 0) first = own;
    differences.excess += own.excess - first.excess;
    differences.ratio += own.ratio - first.ratio;
  }
  return {mean_from(first.excess, differences.excess, in.shape.models),
          mean_from(first.ratio, differences.ratio, in.shape.models)};
}

ADAPMIXED_CORE_END
