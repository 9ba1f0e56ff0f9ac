// Computes the losses from the chunks' single-precision sums, if the bound on their error allows
// it.
#pragma once

#include "leave_one_out/cuda_finish.cuh"
#include "leave_one_out/cuda_float_call.cuh"
#include "leave_one_out/cuda_float_prepare.cuh"

ADAPMIXED_CORE_BEGIN

// Adds the chunks' sums into those of the first chunk. A lane takes one number, each warp of a
// block some of the chunks.
static __global__ void float_totals_kernel(const __grid_constant__ LossCall call,
                                           const __grid_constant__ FloatCall floats) {
  __shared__ double partial[kFloatWarps][kWarp];
  const std::int64_t blocks = (floats.layout.per_chunk + kWarp - 1) / kWarp;
  const std::int64_t member = blockIdx.x / blocks, chunks = floats.layout.chunks;
  const std::int64_t at = blockIdx.x % blocks * kWarp + lane_id();
  if (floats.failed[member]) return;  // true for the whole block
  // A position of a low degree leaves the end of each model's place unwritten.
  const int degree = degree_at(floats.positions[member].degree);
  const std::int64_t own_size = ModelSums::size(degree, call.orders.count);
  const bool written =
      at < floats.layout.per_chunk && (at >= call.in.shape.models * floats.layout.per_model ||
                                       at % floats.layout.per_model < own_size);
  double* sums = float_sums(call, floats, member, 0) + at;
  const bool largest = at == floats.layout.per_chunk - 1;  // growth, the last of TokenSums
  const auto combine = [&](double a, double b) { return largest ? std::fmax(a, b) : a + b; };
  double total = 0.0;  // growth is not negative
#pragma unroll 4
  for (std::int64_t chunk = warp_id(); chunk < chunks; chunk += kFloatWarps) {
    if (written) total = combine(total, sums[chunk * floats.layout.per_chunk]);
  }
  partial[warp_id()][lane_id()] = total;
  __syncthreads();
  if (warp_id() != 0 || !written) return;
  for (int w = 1; w < kFloatWarps; ++w) total = combine(total, partial[w][lane_id()]);
  sums[0] = total;
}

// One block per position.
static __global__ void float_loss_kernel(const __grid_constant__ LossCall call,
                                         const __grid_constant__ FloatCall floats) {
  const std::int64_t member = blockIdx.x, position = call.first + member;
  if (floats.failed[member]) return;
  const FloatPosition found = floats.positions[member];
  const std::int64_t models = call.in.shape.models;
  const int degree = degree_at(found.degree), orders = call.orders.count;
  const double reach = moment_reach(call.all.largest_order, degree);
  double* sums = float_sums(call, floats, member, 0);
  const double* last = sums + models * floats.layout.per_model;
  const TokenSums tokens{last[0], last[1], last[2], last[3], 0.0};
  const auto model = [&](std::int64_t i) {
    return ModelSums{sums + i * floats.layout.per_model, degree};
  };
  double mean_norm[1] = {0.0};
  for (std::int64_t i = threadIdx.x; i < models; i += blockDim.x) {
    mean_norm[0] += std::sqrt(model(i).second(reach)) / static_cast<double>(models);
  }
  block_sum(mean_norm);
  const LossBound bound(call.all, reach, degree, tokens, found.precision, mean_norm[0]);
  double refused = std::fabs(tokens.balance) < kMostBalance ? 0.0 : 1.0;
  for (std::int64_t i = threadIdx.x; i < models; i += blockDim.x) {
    const double first = model(i).first();
    const double balance = call.all.against_public
                               ? -call.all.slots * first
                               : tokens.balance - (call.all.slots - 1.0) * first;
    call.balance[i * call.in.shape.positions + position] = balance;
    if (!(std::fabs(balance) < kMostBalance)) refused = 1.0;
  }
  for (std::int64_t at = threadIdx.x; at < models * orders; at += blockDim.x) {
    const std::int64_t i = at / orders;
    const int k = static_cast<int>(at % orders);
    if (!bound.loss(model(i), k, fit_of(floats, found.degree, orders, k, false),
                    fit_of(floats, found.degree, orders, k, true), call.orders.value[k],
                    call.loss_of(i, position)[k])) {
      refused = 1.0;
    }
  }
  refused = block_max(refused);
  if (threadIdx.x == 0) floats.done[member] = refused == 0.0;
}

ADAPMIXED_CORE_END
