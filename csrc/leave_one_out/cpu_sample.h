// Looks at a few tokens of one position to guess which arithmetic its deviations need. bound.h
// checks the result of the guess.
#pragma once

#include "leave_one_out/bound.h"
#include "leave_one_out/cpu_deviations.h"
#include "leave_one_out/cpu_token_models.h"

ADAPMIXED_CORE_BEGIN

inline std::int64_t sample_scratch_size(std::int64_t models) {
  return TokenModels::scratch_size(models) + models;
}

template <Dtype D>
Arithmetic sample_arithmetic(const Ensemble& in, const Weights& weights, const Neighbours& all,
                             std::int64_t position, double* memory) {
  if (all.against_public) return {false, -1};  // p_bar_i is compared with q, not with the others
  const std::int64_t models = in.shape.models, vocab = in.shape.vocab;
  const TokenModels token(in, weights, all, position, memory);
  double* distance = memory + TokenModels::scratch_size(models);
  for (std::int64_t i = 0; i < models; ++i) distance[i] = 0.0;
  const Row row = row_of(in.public_logits, 0, position);
  double common = 0.0, apart = 0.0;
  for (std::int64_t k = 0; k < kSampledTokens && k < vocab; ++k) {
    const std::int64_t v = vocab <= kSampledTokens ? k : k * vocab / kSampledTokens;
    const double log_q = row.at(v) - in.public_lse[position];
    if (!(log_q > kFloatLogQ)) continue;
    const double mean = token.mean<D>(v), weight = std::exp(log_q) / std::fmax(1.0 + mean, 1e-3);
    common += weight * mean * mean;
    for (std::int64_t i = 0; i < models; ++i) {
      const double difference = token.excess(i) - mean, part = weight * difference * difference;
      distance[i] += part;
      apart += part / static_cast<double>(models);
    }
  }
  std::int64_t nearest = 0;
  for (std::int64_t i = 1; i < models; ++i) {
    if (distance[i] < distance[nearest]) nearest = i;
  }
  return {common > kMostCommon * kMostCommon * apart, nearest};
}

ADAPMIXED_CORE_END
