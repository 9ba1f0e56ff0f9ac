// Runs before the single-precision sums: the constants with which each model's row is read, and
// what the weights and log-sum-exps say about single precision.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_call.cuh"
#include "mixture/cuda_projected.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kCleared = 8;  // words that a thread clears

// Blocks for one position: those that take models, and those that clear the models' sums.
ADAPMIXED_HD std::int64_t float_models_blocks(std::int64_t models, std::int64_t orders) {
  constexpr std::int64_t kEach = kFloatThreads * kCleared;
  return float_facts_of(models) + (ModelTotals::words(models, orders) + kEach - 1) / kEach;
}

// A thread takes a model of a position, or clears what blocks of later kernels add to.
static __global__ void __launch_bounds__(kFloatThreads)
    float_models_kernel(const __grid_constant__ LossCall call) {
  const std::int64_t models = call.in.shape.models, of_models = float_facts_of(models);
  const std::int64_t blocks = float_models_blocks(models, call.orders.count);
  const std::int64_t member = blockIdx.x / blocks, part = blockIdx.x % blocks;
  if (part >= of_models) {
    const std::int64_t words = ModelTotals::words(models, call.orders.count);
    std::int64_t at = (part - of_models) * kFloatThreads * kCleared + threadIdx.x;
    for (int k = 0; k < kCleared && at < words; ++k, at += kFloatThreads) {
      call.model_totals[member * words + at] = 0;
    }
    return;
  }
  const std::int64_t position = call.first + member, i = part * kFloatThreads + threadIdx.x;
  auto* of_tokens = reinterpret_cast<Word*>(call.totals + member);
  if (part == 0 && threadIdx.x < TokenTotals::words()) of_tokens[threadIdx.x] = 0;
  double weight = 0.0, most[3] = {0.0, 0.0, 0.0};  // 1 if floats fail; weight; ratio error
  if (i < models) {
    const std::int64_t at = i * call.in.shape.positions + position;
    const double lse = call.in.private_lse[at], public_lse = call.in.public_lse[position];
    weight = call.weights.weight[at];
    const bool serves =
        admissible(call.in, call.weights, at) && std::fabs(lse - public_lse) < kFloatDifference;
    if (!serves) most[0] = 1.0;
    most[1] = std::fmax(weight, 0.0);
    most[2] = double_ratio_error(lse, public_lse);
    const FloatShift shift = make_shift(lse, public_lse);
    call.models[member * models + i] = {shift.c, shift.lowest,
                                        static_cast<float>(weight * (1.0 + shift.residual)),
                                        static_cast<float>(weight * shift.residual)};
    call.doubles[member * models + i] = {lse - public_lse, weight};
  }
  weight = block_sum(weight);
  block_reduce(most, Max{});
  if (threadIdx.x != 0) return;
  // False also if the public log-sum-exp is NaN.
  const bool serves =
      most[0] == 0.0 && std::fabs(call.in.public_lse[position]) < kFloatLargest + kFloatLogQ;
  call.facts[member * of_models + part] = {weight / call.all.slots, most[1], most[2],
                                           serves ? loss_degree(call.all, most[1]) : -1};
  if (part == 0) call.states[member] = {};
  if (blockIdx.x == 0) *call.progress = {};
}

// The same of all models of a position: the degree grows with the largest weight.
__device__ inline FloatFacts float_facts(const LossCall& call, std::int64_t member) {
  const std::int64_t blocks = float_facts_of(call.in.shape.models);
  const FloatFacts* facts = call.facts + member * blocks;
  FloatFacts all = facts[0];
  for (int k = 1; k < blocks; ++k) {
    const FloatFacts other = facts[k];
    all.mean_weight += other.mean_weight;
    all.largest_weight = std::fmax(other.largest_weight, all.largest_weight);
    all.ratio_error = std::fmax(other.ratio_error, all.ratio_error);
    const bool fails = all.degree < 0 || other.degree < 0;
    all.degree = fails ? -1 : other.degree > all.degree ? other.degree : all.degree;
  }
  return all;
}

ADAPMIXED_CORE_END
