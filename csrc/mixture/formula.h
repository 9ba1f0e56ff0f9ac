// One token of the mixture p = mean_i p_bar_i, with each p_bar_i from its Renyi ball or its box.
#pragma once

#include <cmath>
#include <cstdint>

#include "clip/formula.h"
#include "common/float_ratio.h"
#include "common/view.h"

ADAPMIXED_CORE_BEGIN

// log p_bar_i(v) from the logits, however rare the token is.
ADAPMIXED_HD double log_projected(const Ensemble& in, const Weights& weights, std::int64_t model,
                                  std::int64_t position, std::int64_t v) {
  const std::int64_t at = model * in.shape.positions + position;
  const double log_q = row_of(in.public_logits, 0, position).at(v) - in.public_lse[position];
  const double z = row_of(in.private_logits, model, position).at(v), lse = in.private_lse[at];
  if (weights.upper > 0.0) return log_clipped(weights, at, z, lse, log_q);
  const double log_p = z - lse;
  if (log_p == log_q) return log_q;  // exactly, whatever the weight
  // 0 times anything is 0 here, also if the logit is -inf.
  const double from_p = weights.weight[at] > 0.0 ? std::log(weights.weight[at]) + log_p : -HUGE_VAL;
  const double from_q =
      rest_of(weights, at) > 0.0 ? std::log(rest_of(weights, at)) + log_q : -HUGE_VAL;
  return log_add(from_p, from_q);
}

// Returns whether a row has a log-sum-exp and valid weights; NaN fails every comparison.
ADAPMIXED_HD bool admissible(const Ensemble& in, const Weights& weights, std::int64_t at) {
  const double weight = weights.weight[at], rest = rest_of(weights, at);
  const bool valid = weights.upper > 0.0
                         ? weight > -HUGE_VAL && rest >= weights.lower && rest <= weights.upper
                         : weight >= 0.0 && weight <= 1.0;
  return valid && std::fabs(in.private_lse[at]) < HUGE_VAL;
}

// Whether p_bar_i is q, exactly, at the tokens from `begin` to `end`.
ADAPMIXED_HD bool answers_public(const Ensemble& in, const Weights& weights, std::int64_t model,
                                 std::int64_t position, std::int64_t begin, std::int64_t end) {
  const std::int64_t at = model * in.shape.positions + position;
  if (weights.upper == 0.0 && weights.weight[at] == 0.0) return true;
  if (weights.active != nullptr && !weights.active[at]) return true;
  if (in.private_lse[at] != in.public_lse[position]) return false;
  const Row own = row_of(in.private_logits, model, position);
  const Row other = row_of(in.public_logits, 0, position);
  while (begin < end && begin < in.shape.vocab && own.at(begin) == other.at(begin)) ++begin;
  return begin >= end || begin >= in.shape.vocab;
}

// Whether no model answers a token that the public row masks.
ADAPMIXED_HD bool masked_by_all(const Ensemble& in, const Weights& weights, std::int64_t position,
                                std::int64_t token) {
  for (std::int64_t i = 0; i < in.shape.models && weights.upper == 0.0; ++i) {
    const std::int64_t at = i * in.shape.positions + position;
    const double log_p = row_of(in.private_logits, i, position).at(token) - in.private_lse[at];
    if (weights.weight[at] > 0.0 && !(log_p <= kMaskedLog)) return false;
  }
  return true;
}

ADAPMIXED_CORE_END
