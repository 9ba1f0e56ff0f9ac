// Computes the losses from the chunks' sums: finds the positions that have losses, converts their
// sums, and uses the log domain if sums overflowed.
#pragma once

#include "leave_one_out/cuda_rare.cuh"
#include "leave_one_out/rare.h"
#include "mixture/cuda_projected.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kFinishThreads = 128;

// A kernel cannot raise an error for a projection of other rows (kMostBalance). The losses of such
// a position are +inf.

// The total over all chunks of the sum at index `at`.
__device__ inline double chunks_total(const LossCall& call, std::int64_t member, std::int64_t at) {
  const double* sums = call.sums + member * call.layout.chunks * call.layout.per_chunk + at;
  double total = 0.0;
  for (std::int64_t c = 0; c < call.layout.chunks; ++c) total += sums[c * call.layout.per_chunk];
  return total;
}

// One block per position.
static __global__ void loss_balance_kernel(const __grid_constant__ LossCall call) {
  const std::int64_t member = blockIdx.x, position = call.first + member;
  if (call.finished(member)) return;
  double foreign = std::fabs(call.in.public_lse[position]) < HUGE_VAL ? 0.0 : 1.0;
  for (std::int64_t i = threadIdx.x; i < call.in.shape.models; i += blockDim.x) {
    const std::int64_t at = i * call.in.shape.positions + position;
    const double balance = chunks_total(call, member, call.balance_at(i));
    call.balance[at] = balance;
    if (!(std::fabs(balance) <= kMostBalance && admissible(call.in, call.weights, at)))
      foreign = 1.0;
  }
  foreign = block_max(foreign);
  if (threadIdx.x == 0) {
    call.foreign[member] = foreign != 0.0;
    call.overflowed[member] = 0;
  }
}

// The loss that a thread writes. The grid is (members of the group) x (blocks for N K losses).
struct LossPlace {
  std::int64_t member, position, model;
  int order;
  bool exists;
};
__device__ inline LossPlace loss_place(const LossCall& call) {
  const std::int64_t losses = call.in.shape.models * call.orders.count;
  const std::int64_t blocks = (losses + kFinishThreads - 1) / kFinishThreads;
  const std::int64_t k = blockIdx.x % blocks * kFinishThreads + threadIdx.x;
  const std::int64_t member = blockIdx.x / blocks;
  return {member, call.first + member, k / call.orders.count,
          static_cast<int>(k % call.orders.count), k < losses};
}

static __global__ void loss_kernel(const __grid_constant__ LossCall call) {
  const LossPlace at = loss_place(call);
  if (!at.exists || call.finished(at.member)) return;
  double loss = HUGE_VAL;
  if (!call.foreign[at.member]) {
    const std::int64_t sums = call.sums_at(at.model, at.order);
    loss = divergence_from_excess(chunks_total(call, at.member, sums),
                                  chunks_total(call, at.member, sums + 1),
                                  call.orders.value[at.order]);
    if (loss == HUGE_VAL) atomicExch(&call.overflowed[at.member], 1);
  }
  call.loss_of(at.model, at.position)[at.order] = loss;
}

// Runs after log_sums_kernel.
static __global__ void log_loss_kernel(const __grid_constant__ LossCall call) {
  const LossPlace at = loss_place(call);
  if (!at.exists || call.finished(at.member) || !call.overflowed[at.member]) return;
  double& loss = call.loss_of(at.model, at.position)[at.order];
  if (loss != HUGE_VAL) return;
  const double* sums = call.sums + at.member * call.layout.chunks * call.layout.per_chunk +
                       call.sums_at(at.model, at.order);
  double forward = -HUGE_VAL, reverse = -HUGE_VAL;
  for (std::int64_t c = 0; c < call.layout.chunks; ++c, sums += call.layout.per_chunk) {
    forward = LogAdd{}(forward, sums[0]);
    reverse = LogAdd{}(reverse, sums[1]);
  }
  loss = divergence_from_logs(forward, reverse, call.orders.value[at.order]);
}

ADAPMIXED_CORE_END
