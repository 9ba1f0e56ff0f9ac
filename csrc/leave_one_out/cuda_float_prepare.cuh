// Runs before the single-precision sums: one block finds out what each position needs.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_float_call.cuh"
#include "mixture/cuda_projected.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kPositionThreads = 1024;  // a warp a token, then a warp a model

// Looks at a few tokens to guess whether the models share more than they differ by. If so, returns
// the model nearest to their mean, else -1. The bound checks the result of the guess. A whole block
// must call this together.
template <Dtype D>
__device__ int sampled_base(const LossCall& call, std::int64_t position) {
  if (call.all.against_public) return -1;  // p_bar_i is compared with q, not with the others
  __shared__ double mean[kSampledTokens], weight[kSampledTokens];
  const std::int64_t vocab = call.in.shape.vocab, models = call.in.shape.models;
  const auto* row = row_bits<D>(call.in.public_logits, 0, position);
  const auto token = [&](int k) {
    return vocab <= kSampledTokens ? static_cast<std::int64_t>(k) : k * vocab / kSampledTokens;
  };
  const auto delta = [&](std::int64_t i, std::int64_t v) {
    return projected_at(model_row<D>(call.in, call.weights, i, position), v, logit<D>(row, v))
        .excess;
  };
  for (int k = warp_id(); k < kSampledTokens; k += warp_count()) {
    double total[1] = {0.0};
    double log_q = -HUGE_VAL;
    if (token(k) < vocab) log_q = logit<D>(row, token(k)) - call.in.public_lse[position];
    const bool counts = log_q > kFloatLogQ;
    if (counts) {
      for (std::int64_t i = lane_id(); i < models; i += kWarp) total[0] += delta(i, token(k));
    }
    warp_reduce(total, Add{});
    if (lane_id() == 0) {
      mean[k] = total[0] / call.all.slots;
      weight[k] = counts ? exp_(log_q) / std::fmax(1.0 + mean[k], 1e-3) : 0.0;
    }
  }
  __syncthreads();
  double common = 0.0, apart = 0.0, least = HUGE_VAL;
  std::int64_t nearest = models;
  if (threadIdx.x < kSampledTokens) {
    common = weight[threadIdx.x] * mean[threadIdx.x] * mean[threadIdx.x];
  }
  for (std::int64_t i = warp_id(); i < models; i += warp_count()) {
    double distance[1] = {0.0};
    for (int k = lane_id(); k < kSampledTokens; k += kWarp) {
      if (weight[k] == 0.0) continue;
      const double difference = delta(i, token(k)) - mean[k];
      distance[0] += weight[k] * difference * difference;
    }
    warp_reduce(distance, Add{});
    if (lane_id() != 0) continue;
    apart += distance[0] / static_cast<double>(models);
    if (distance[0] < least) {
      least = distance[0];
      nearest = i;
    }
  }
  double sums[2] = {common, apart};
  block_sum(sums);
  if (!(sums[0] > kMostCommon * kMostCommon * sums[1])) return -1;
  // The first of the nearest models.
  const double nearest_of_all = -block_max(-least);
  const double first = -block_max(least == nearest_of_all ? -static_cast<double>(nearest)
                                                          : -static_cast<double>(models));
  return first < static_cast<double>(models) ? static_cast<int>(first) : -1;
}

// One block per position. It also clears what the blocks of later kernels tell each other.
template <Dtype D>
__global__ void __launch_bounds__(kPositionThreads)
    float_positions_kernel(const __grid_constant__ LossCall call,
                           const __grid_constant__ FloatCall floats) {
  const std::int64_t member = blockIdx.x, position = call.first + member;
  const std::int64_t models = call.in.shape.models;
  const double public_lse = call.in.public_lse[position];
  double total[1] = {0.0};           // the sum of the weights
  double most[3] = {0.0, 0.0, 0.0};  // 1 if floats fail on a row; weight; ratio error
  for (std::int64_t i = threadIdx.x; i < models; i += blockDim.x) {
    const std::int64_t at = i * call.in.shape.positions + position;
    const double weight = call.weights.weight[at], lse = call.in.private_lse[at];
    const bool serves =
        admissible(call.in, call.weights, at) && std::fabs(lse - public_lse) < kFloatDifference;
    if (!serves) most[0] = 1.0;
    total[0] += weight;
    most[1] = std::fmax(most[1], weight);
    most[2] = std::fmax(most[2], double_ratio_error(lse, public_lse));
    const FloatShift shift = make_shift(lse, public_lse);
    floats.models[member * models + i] = {shift.c, shift.lowest,
                                          static_cast<float>(weight * (1.0 + shift.residual)),
                                          static_cast<float>(weight * shift.residual)};
  }
  block_sum(total);
  block_reduce(most, Max{});
  FloatPosition found{};
  found.degree = -1;
  found.base_model = -1;
  // False also if the public log-sum-exp is NaN.
  if (most[0] == 0.0 && std::fabs(public_lse) < kFloatLargest + kFloatLogQ) {
    found.degree = loss_degree(call.all, most[1]);
    found.base_model = sampled_base<D>(call, position);
  }
  found.mean_weight = total[0] / call.all.slots;
  found.precision = {found.base_model >= 0, most[1], most[2]};
  if (threadIdx.x == 0) {
    floats.positions[member] = found;
    call.states[member] = {found.degree < 0, 0, 0, 0, 0};
    if (member == 0) *call.progress = {0, 0, 0, 0};
  }
}

ADAPMIXED_CORE_END
