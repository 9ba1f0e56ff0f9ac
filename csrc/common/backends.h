// The two back ends as types, for code that serves both.
#pragma once

#include "common/operators.h"

namespace adapmixed {

#define ADAPMIXED_OPERATORS(backend)                                       \
  static constexpr auto log_sum_exp = &backend::log_sum_exp;               \
  static constexpr auto project = &backend::project;                       \
  static constexpr auto clip_project = &backend::clip_project;             \
  static constexpr auto leave_one_out = &backend::leave_one_out;           \
  static constexpr auto mixture = &backend::mixture;                       \
  static constexpr auto log_prob = &backend::log_prob;                     \
  static constexpr auto log_pool = &backend::log_pool;                     \
  static constexpr auto pool_mixture = &backend::pool_mixture;             \
  static constexpr auto pool_probabilities = &backend::pool_probabilities; \
  static constexpr auto pool_log_prob = &backend::pool_log_prob;           \
  static constexpr auto renyi_divergence = &backend::renyi_divergence;     \
  static constexpr auto add_low_rank = &backend::add_low_rank;             \
  static constexpr auto screen = &backend::screen;                         \
  static constexpr auto gaussian = &backend::gaussian;                     \
  static constexpr auto sample = &backend::sample

struct Cpu {
  ADAPMIXED_OPERATORS(cpu);
};

struct Cuda {
  ADAPMIXED_OPERATORS(cuda);
  static constexpr auto mixture_workspace = &cuda::mixture_workspace;
  static constexpr auto sample_workspace = &cuda::sample_workspace;
};

#undef ADAPMIXED_OPERATORS

}  // namespace adapmixed
