// All models at one token in double, for the tokens that the float sums do not handle.
#pragma once

#include "common/rows.h"
#include "leave_one_out/formula.h"

ADAPMIXED_CORE_BEGIN

class TokenModels {
 public:
  static std::int64_t scratch_size(std::int64_t models) { return 2 * round_up(models, 8); }

  TokenModels(const Ensemble& in, const Weights& weights, const Neighbours& all,
              std::int64_t position, double* memory)
      : in_(in),
        weights_(weights),
        all_(all),
        position_(position),
        excess_(memory),
        ratio_(memory + round_up(in.shape.models, 8)) {}

  // The mean of delta over the slots.
  template <Dtype D>
  double mean(std::int64_t v) const {
    load<D>(v);
    double total = 0.0;
    for (std::int64_t j = 0; j < in_.shape.models; ++j) total += excess_[j];
    return total / all_.slots;
  }

  // x = p'/p - 1 of model i, accurate also if little of p is left without the model.
  template <Dtype D>
  double excess_from_rest(std::int64_t i, std::int64_t v) const {
    load<D>(v);
    double total = all_.absent, rest = all_.absent;
    for (std::int64_t j = 0; j < in_.shape.models; ++j) {
      total += ratio_[j];
      if (j != i) rest += ratio_[j];
    }
    return ratio_from_rest(all_, rest, total) - 1.0;
  }

  // delta of model i at the token that mean() or excess_from_rest() read last.
  double excess(std::int64_t i) const { return excess_[i]; }

 private:
  template <Dtype D>
  void load(std::int64_t v) const {
    const std::int64_t models = in_.shape.models, positions = in_.shape.positions;
    const double z0 = row_of(in_.public_logits, 0, position_).at(v);
    const double public_lse = in_.public_lse[position_];
    const char* data = row_of(in_.private_logits, 0, position_).data;
    const std::int64_t stride = in_.private_logits.stride_model * kElementSize<D>;
    for (std::int64_t j = 0; j < round_up(models, 8); ++j) {
      excess_[j] = 0.0;
      if (j >= models) continue;
      const double z = Row{data + j * stride, D}.at(v);
      excess_[j] = z - z0 - (in_.private_lse[j * positions + position_] - public_lse);
    }
    for (std::int64_t j = 0; j < models; j += Vec::kLanes) {
      const Ratio<Vec> r = ratio(Vec::load(excess_ + j));
      r.d.store(excess_ + j);
      r.r.store(ratio_ + j);
    }
    for (std::int64_t j = 0; j < models; ++j) {
      const std::int64_t at = j * positions + position_;
      excess_[j] *= weights_.weight[at];
      ratio_[j] = std::fma(weights_.weight[at], ratio_[j], weights_.complement[at]);
    }
  }

  const Ensemble& in_;
  const Weights& weights_;
  const Neighbours& all_;
  std::int64_t position_;
  double *excess_, *ratio_;
};

ADAPMIXED_CORE_END
