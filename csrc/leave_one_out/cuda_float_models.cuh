// Runs before the single-precision sums: the constants with which each model's row is read, and
// what the weights and log-sum-exps say about single precision.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_call.cuh"
#include "mixture/cuda_projected.cuh"

ADAPMIXED_CORE_BEGIN

// A thread takes a model of a position. It also clears what the blocks of later kernels tell each
// other.
static __global__ void __launch_bounds__(kFloatThreads)
    float_models_kernel(const __grid_constant__ LossCall call) {
  const std::int64_t models = call.in.shape.models, blocks = float_facts_of(models);
  const std::int64_t member = blockIdx.x / blocks, position = call.first + member;
  const std::int64_t i = blockIdx.x % blocks * kFloatThreads + threadIdx.x;
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
  }
  weight = block_sum(weight);
  block_reduce(most, Max{});
  if (threadIdx.x != 0) return;
  call.facts[blockIdx.x] = {most[0], weight, most[1], most[2]};
  if (blockIdx.x % blocks == 0) call.states[member] = {};
  if (blockIdx.x == 0) *call.progress = {};
}

__device__ inline FloatPosition float_position(const LossCall& call, std::int64_t member) {
  const std::int64_t blocks = float_facts_of(call.in.shape.models);
  const FloatFacts* facts = call.facts + member * blocks;
  FloatFacts all = facts[0];
  for (int k = 1; k < blocks; ++k) {
    all.failed = std::fmax(facts[k].failed, all.failed);
    all.weights += facts[k].weights;
    all.largest_weight = std::fmax(facts[k].largest_weight, all.largest_weight);
    all.ratio_error = std::fmax(facts[k].ratio_error, all.ratio_error);
  }
  // False also if the public log-sum-exp is NaN.
  const bool serves = all.failed == 0.0 && std::fabs(call.in.public_lse[call.first + member]) <
                                               kFloatLargest + kFloatLogQ;
  return {serves ? loss_degree(call.all, all.largest_weight) : -1,
          all.weights / call.all.slots,
          {all.largest_weight, all.ratio_error}};
}

ADAPMIXED_CORE_END
