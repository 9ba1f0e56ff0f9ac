// Adds up the chunks' single-precision sums, and computes the losses if the bound on their error
// allows it.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_fits.cuh"
#include "leave_one_out/cuda_float_models.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kFloatWarps = kFloatThreads / kWarp;

// Adds the chunks' sums into those of the first chunk. A lane takes one number, each warp of the
// block some of the chunks.
__device__ inline void add_chunks(const LossCall& call, int degree, int at, double* sums) {
  constexpr int kAtOnce = 16;  // loads on their way
  __shared__ double partial[kFloatWarps][kWarp];
  const int per_chunk = static_cast<int>(call.floats.per_chunk);
  const int per_model = static_cast<int>(call.floats.per_model);
  const int chunks = static_cast<int>(call.floats.chunks);
  const int own_size = static_cast<int>(ModelSums::size(degree, call.orders.count));
  // A position of a low degree leaves the end of each model's place unwritten.
  const bool written =
      at < per_chunk && (at >= per_chunk - kTokenSums || at % per_model < own_size);
  const bool largest = at >= per_chunk - kTokenMaxima;  // these are not negative
  // In bytes, of which a position has less than 2^32: the sum with the address needs no multiply.
  const auto* begin = reinterpret_cast<const char*>(sums + at);
  const auto step = static_cast<unsigned>(8 * kFloatWarps * call.floats.per_chunk);
  auto from = static_cast<unsigned>(8 * warp_id() * call.floats.per_chunk);
  double total = 0.0;
  for (int first = warp_id(); first < chunks; first += kAtOnce * kFloatWarps) {
    double own[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j, from += step) {
      const bool present = written && first + j * kFloatWarps < chunks;
      own[j] = present ? *reinterpret_cast<const double*>(begin + from) : 0.0;
    }
    __syncwarp();  // for speed alone: loads are not moved beyond it
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) total = largest ? vmax(own[j], total) : total + own[j];
  }
  partial[warp_id()][lane_id()] = total;
  __syncthreads();
  if (warp_id() == 0 && written) {
    for (int w = 1; w < kFloatWarps; ++w) {
      const double other = partial[w][lane_id()];
      total = largest ? vmax(other, total) : total + other;
    }
    sums[at] = total;
  }
  __syncthreads();  // before the first thread tells other blocks that they are written
}

// Writes the balances and losses of a position. Returns whether all losses are within the bound. A
// whole block must call this together.
template <int kOrders>
__device__ bool write_losses(const LossCall& call, const PackedFits<kOrders>& fits,
                             const FloatPosition& found, std::int64_t position, double* sums) {
  const int models = static_cast<int>(call.in.shape.models), orders = call.orders.count;
  const int degree = degree_at(found.degree);
  const double reach = moment_reach(call.all.largest_order, degree);
  const double* last = sums + models * call.floats.per_model;
  const TokenSums tokens{last[0], last[1], last[2], last[4], last[3], last[5]};
  const auto model = [&](int i) { return ModelSums{sums + i * call.floats.per_model, degree}; };
  double mean_norm[1] = {0.0};
  for (int i = static_cast<int>(threadIdx.x); i < models; i += kFloatThreads) {
    mean_norm[0] += std::sqrt(model(i).second(reach)) / static_cast<double>(models);
  }
  block_sum(mean_norm);
  const LossBound bound(call.all, reach, degree, tokens, found.precision, mean_norm[0]);
  bool refused = !(std::fabs(tokens.balance) < kMostBalance);
  for (int at = static_cast<int>(threadIdx.x); at < models * orders; at += kFloatThreads) {
    const int i = at / orders, k = at % orders;
    const ModelSums own = model(i);
    if (k == 0) {
      const double balance = call.all.against_public
                                 ? -call.all.slots * own.first()
                                 : tokens.balance - (call.all.slots - 1.0) * own.first();
      call.balance[i * call.in.shape.positions + position] = balance;
      refused = refused || !(std::fabs(balance) < kMostBalance);
    }
    const bool within =
        bound.loss(own, k, fits.forward[k].at(found.degree), fits.reverse[k].at(found.degree),
                   call.orders.value[k], call.loss_of(i, position)[k]);
    refused = refused || !within;
  }
  return __syncthreads_or(refused) == 0;
}

static_assert(sizeof(LossCall) + sizeof(PackedFits<kMaxOrders>) <= 32764,
              "the most that a kernel's arguments may take");

// A block takes a warp's width of the numbers of one position. The position's last block computes
// its losses.
template <int kOrders>
__global__ void __launch_bounds__(kFloatThreads, 2)
    float_finish_kernel(const __grid_constant__ LossCall call,
                        const __grid_constant__ PackedFits<kOrders> fits) {
  const auto blocks = static_cast<unsigned>((call.floats.per_chunk + kWarp - 1) / kWarp);
  const std::int64_t member = blockIdx.x / blocks;
  LossState& state = call.states[member];
  bool served = state.failed == 0;  // the same for every thread: this kernel does not write it
  if (served) {
    const FloatPosition found = float_position(call, member);
    double* sums = float_sums(call, member, 0);
    add_chunks(call, degree_at(found.degree),
               static_cast<int>(blockIdx.x % blocks) * kWarp + lane_id(), sums);
    if (!is_last_block(&state.totalled, blocks)) return;
    served = write_losses(call, fits, found, call.first + member, sums);
  } else if (blockIdx.x % blocks != 0) {
    return;
  }
  if (!served && threadIdx.x == 0) {
    call.states[atomicAdd(&call.progress->left, 1u)].left_at = static_cast<unsigned>(member);
  }
}

ADAPMIXED_CORE_END
