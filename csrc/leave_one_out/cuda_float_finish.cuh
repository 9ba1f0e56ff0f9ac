// Computes the losses from the single-precision sums if the bound on their error allows it.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_fits.cuh"
#include "leave_one_out/cuda_float_models.cuh"

ADAPMIXED_CORE_BEGIN

// A block's losses: two lanes share one, each with one direction.
constexpr int kFloatLosses = kFloatThreads / 2;

// Blocks for the losses of one position.
ADAPMIXED_HD std::int64_t float_finish_blocks(const LossCall& call) {
  return (call.in.shape.models * call.orders.count + kFloatLosses - 1) / kFloatLosses;
}

// The sums of a position's tokens, and its mass. A thread takes a sum.
struct TokenValues {
  static constexpr int kSums = 5;
  double sums[kSums];

  __device__ void set(const TokenTotals& totals) {
    const WideSum* all = &totals.mass;
    if (threadIdx.x < kSums) sums[threadIdx.x] = all[threadIdx.x].value();
  }
  __device__ double mass() const { return sums[0]; }
  __device__ TokenSums with(const TokenTotals& totals) const {
    return {sums[1], sums[2],
            sums[3], bit_cast<double>(totals.growth),
            sums[4], bit_cast<double>(totals.float_growth)};
  }
};

// Writes this lane's loss and, for the first order, the balance: number `at` of the (K, N) of a
// position, so that most lanes of a warp read the same interpolants. Returns whether the loss is
// within its bound. A whole block must call this together.
template <int kOrders>
__device__ bool write_loss(const LossCall& call, const PackedFits<kOrders>& fits,
                           const FloatFacts& facts, std::int64_t member, std::int64_t at) {
  __shared__ double moments[kMaxMoments][kFloatThreads];
  __shared__ TokenValues values;
  const std::int64_t models = call.in.shape.models, position = call.first + member;
  const int degree = degree_at(facts.degree), thread = static_cast<int>(threadIdx.x);
  const double reach = call.reach[facts.degree];
  const double error = 0.55 * kFixedUnit * call.floats.tiles;  // 0.5, and what else it changes
  const ModelTotals totals = model_totals(call, member);
  const bool present = at < models * call.orders.count;
  // A lane without a loss takes the last one's place.
  const std::int64_t i = present ? at % models : models - 1;
  const int k = present ? static_cast<int>(at / models) : 0, side = thread % 2;
  values.set(call.totals[member]);
#pragma unroll
  for (int m = 0; m < kMaxMoments; ++m) {
    if (m < degree) moments[m][thread] = totals.moment(i, m);
  }
  const ListedTotals& own_listed = totals.listed[i * totals.orders + k];
  const double listed = own_listed.excess[side].value();
  // One lane has the slope, the other what is left of the balance.
  const double half = (side == 0 ? own_listed.slope : totals.firsts[i]).value();
  const double other_half = __shfl_xor_sync(kAllLanes, half, 1);
  const double slope = side == 0 ? half : other_half, rest = side == 0 ? other_half : half;
  const double size = std::sqrt(totals.second(i, reach, error));
  double mean_norm = 0.0;
  for (std::int64_t j = thread; j < models; j += kFloatThreads) {
    mean_norm += std::sqrt(totals.second(j, reach, error));
  }
  mean_norm = block_sum(mean_norm) / static_cast<double>(models);
  const TokenSums tokens = values.with(call.totals[member]);
  // If the mass is 1 no sum of p t^k has left the range of its fixed-point number.
  const bool balanced = std::fabs(tokens.balance) < kMostBalance;
  if (!balanced || !(std::fabs(values.mass() - 1.0) < kMostBalance)) return false;
  const LossBound bound(call.all, reach, degree, tokens, {facts.largest_weight, facts.ratio_error},
                        mean_norm);
  const PackedFit& fit = side == 0 ? fits.forward[k] : fits.reverse[k];
  const FixedMoments own{{&moments[0][thread]}, error};
  const LossBound::Excess mine =
      bound.direction(fit.at(facts.degree), own, size, listed, {listed, listed, 0.0, slope});
  const LossBound::Excess other{__shfl_xor_sync(kAllLanes, mine.value, 1),
                                __shfl_xor_sync(kAllLanes, mine.error, 1)};
  double loss = 0.0;
  const bool within = bound.loss(mine, other, size, call.orders.value[k], loss);
  const double first = totals.first(i, reach, rest);
  const double balance = call.all.against_public ? -call.all.slots * first
                                                 : tokens.balance - (call.all.slots - 1.0) * first;
  if (present && side == 0) {
    call.loss_of(i, position)[k] = call.reported(loss, i, position);
    if (k == 0) call.balance[i * call.in.shape.positions + position] = balance;
  }
  return within && std::fabs(balance) < kMostBalance;
}

static_assert(sizeof(LossCall) + sizeof(PackedFits<kMaxOrders>) <= 32764,
              "the most that a kernel's arguments may take");

// The first block of a position to find a loss that is not within its bound leaves the position to
// the kernel in double.
template <int kOrders>
__global__ void __launch_bounds__(kFloatThreads)
    float_finish_kernel(const __grid_constant__ LossCall call,
                        const __grid_constant__ PackedFits<kOrders> fits) {
  const std::int64_t blocks = float_finish_blocks(call), member = blockIdx.x / blocks;
  const std::int64_t at = blockIdx.x % blocks * kFloatLosses + threadIdx.x / 2;
  const FloatFacts facts = float_facts(call, member);
  LossState& state = call.states[member];
  // The same for every thread: this kernel does not write it.
  bool served = facts.degree >= 0 && state.failed == 0;
  if (served) served = write_loss(call, fits, facts, member, at);
  if (__syncthreads_or(!served) && threadIdx.x == 0 && atomicExch(&state.refused, 1) == 0) {
    call.states[atomicAdd(&call.progress->left, 1u)].left_at = static_cast<unsigned>(member);
  }
}

ADAPMIXED_CORE_END
