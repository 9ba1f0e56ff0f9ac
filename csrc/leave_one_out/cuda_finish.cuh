// All work in double, in one kernel: sums of the chunks, their totals, the losses, and the log
// domain if sums overflowed.
//
// The work is in pieces, and each phase needs all pieces of those before it. Blocks take the pieces
// in order, by an atomic counter. So a block waits only for pieces that were taken earlier, by
// blocks that are running, whichever order the GPU starts blocks in.
#pragma once

#include "leave_one_out/cuda_rare.cuh"
#include "leave_one_out/rare.h"
#include "mixture/cuda_projected.cuh"

ADAPMIXED_CORE_BEGIN

// The total over all chunks of the sum at index `at`.
__device__ inline double chunks_total(const LossCall& call, std::int64_t member, std::int64_t at) {
  const double* sums = call.sums + member * call.layout.chunks * call.layout.per_chunk + at;
  double total = 0.0;
#pragma unroll 8
  for (std::int64_t c = 0; c < call.layout.chunks; ++c) total += sums[c * call.layout.per_chunk];
  return total;
}

// A kernel cannot raise an error for a projection of other rows (kMostBalance). The losses of such
// a position are +inf. A thread takes a model.
__device__ inline void find_balance(const LossCall& call, std::int64_t member, std::int64_t i) {
  const std::int64_t position = call.first + member;
  if (i >= call.in.shape.models) return;
  const std::int64_t at = i * call.in.shape.positions + position;
  const double balance = chunks_total(call, member, call.balance_at(i));
  call.balance[at] = balance;
  const double mass = chunks_total(call, member, call.mass_at());
  const bool good = std::fabs(balance) <= kMostBalance && std::fabs(mass - 1.0) <= kMostBalance &&
                    admissible(call.in, call.weights, at) &&
                    std::fabs(call.in.public_lse[position]) < HUGE_VAL;
  if (!good) atomicExch(&call.states[member].foreign, 1);
}

// A thread takes a loss: number `at` of the (N, K) of its position.
__device__ inline void find_loss(const LossCall& call, std::int64_t member, std::int64_t at) {
  const std::int64_t model = at / call.orders.count;
  const int k = static_cast<int>(at % call.orders.count);
  if (model >= call.in.shape.models) return;
  double loss = HUGE_VAL;
  if (!__ldcv(&call.states[member].foreign)) {
    const std::int64_t sums = call.sums_at(model, k);
    loss = divergence_from_excess(chunks_total(call, member, sums),
                                  chunks_total(call, member, sums + 1), call.orders.value[k]);
    if (loss == HUGE_VAL) atomicExch(&call.states[member].overflowed, 1);
    loss = call.reported(loss, model, call.first + member);
  }
  call.loss_of(model, call.first + member)[k] = loss;
}

// The same from the logarithms of the sums, if the sums overflowed.
__device__ inline void find_log_loss(const LossCall& call, std::int64_t member, std::int64_t at) {
  const std::int64_t model = at / call.orders.count;
  const int k = static_cast<int>(at % call.orders.count);
  if (model >= call.in.shape.models) return;
  double& loss = call.loss_of(model, call.first + member)[k];
  if (loss != HUGE_VAL) return;
  const double* sums =
      call.sums + member * call.layout.chunks * call.layout.per_chunk + call.sums_at(model, k);
  double forward = -HUGE_VAL, reverse = -HUGE_VAL;
  for (std::int64_t c = 0; c < call.layout.chunks; ++c, sums += call.layout.per_chunk) {
    forward = LogAdd{}(forward, sums[0]);
    reverse = LogAdd{}(reverse, sums[1]);
  }
  loss = raised(divergence_from_logs(forward, reverse, call.orders.value[k]));
}

// The number of the next piece. A whole block must call this together.
__device__ inline std::int64_t take_piece(LossProgress* progress) {
  __shared__ unsigned taken;
  __syncthreads();  // the last number has been read
  if (threadIdx.x == 0) taken = atomicAdd(&progress->taken, 1u);
  __syncthreads();
  return taken;
}

// Waits until all pieces before number `count` are done. A whole block must call this together.
__device__ inline void wait_for_pieces(const LossProgress* progress, std::int64_t count) {
  if (threadIdx.x == 0) {
    while (__ldcv(&progress->done) < count) __nanosleep(100);
    __threadfence();
  }
  __syncthreads();
}

__device__ inline void piece_done(LossProgress* progress) {
  __syncthreads();  // all threads have written
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(&progress->done, 1u);
  }
}

// Blocks of threads that take a thread each for `count` numbers.
ADAPMIXED_HD std::int64_t loss_blocks(std::int64_t count) {
  return (count + kLossThreads - 1) / kLossThreads;
}
ADAPMIXED_HD std::int64_t loss_pieces(const LossCall& call, std::int64_t positions) {
  const std::int64_t models = call.in.shape.models;
  return positions * (2 * call.layout.chunks + loss_blocks(models) +
                      2 * loss_blocks(models * call.orders.count));
}

// `positions`: those of the group, unless only some of them are left by floats.
template <Dtype D>
__global__ void __launch_bounds__(kLossThreads, 3)
    double_loss_kernel(const __grid_constant__ LossCall call, std::int64_t positions) {
  __shared__ LossTile tile;
  __shared__ RareSums shared[kLossTile];
  LossProgress* progress = call.progress;
  const std::int64_t left = call.after_floats ? progress->left : positions;
  const std::int64_t models = call.in.shape.models, orders = call.orders.count;
  const std::int64_t chunks = call.layout.chunks, pieces = loss_pieces(call, left);
  for (;;) {
    if (left == 0) return;
    std::int64_t piece = take_piece(progress);
    if (piece >= pieces) return;
    std::int64_t before = 0, parts = chunks;  // pieces before the phase; of a position
    int phase = 0;
    while (piece - before >= left * parts) {
      before += left * parts;
      ++phase;
      parts = phase == 1 ? loss_blocks(models) : phase == 3 ? chunks : loss_blocks(models * orders);
    }
    if (phase > 0) wait_for_pieces(progress, before);
    piece -= before;
    const std::int64_t part = piece % parts, index = piece / parts;
    const std::int64_t member = call.after_floats ? call.states[index].left_at : index;
    const std::int64_t own = part * kLossThreads + threadIdx.x;
    if (phase == 0) {
      sum_chunk<D>(call, loss_chunk(call, member, part), tile, shared);
    } else if (phase == 1) {
      find_balance(call, member, own);
    } else if (phase == 2) {
      find_loss(call, member, own);
    } else if (__ldcv(&call.states[member].overflowed)) {  // no block writes it any more
      if (phase == 3) {
        log_sum_chunk(call, loss_chunk(call, member, part), shared);
      } else {
        find_log_loss(call, member, own);
      }
    }
    piece_done(progress);
  }
}

ADAPMIXED_CORE_END
