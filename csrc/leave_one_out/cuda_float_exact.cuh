// Sums in double the tokens of a tile that single precision leaves out. One warp per token finds
// the numbers that all models share; then one thread per model adds its terms.
#pragma once

#include "leave_one_out/cuda_call.cuh"
#include "leave_one_out/cuda_sums.cuh"

ADAPMIXED_CORE_BEGIN

// Lists the tokens whose bits are set, in order, and returns their number. A whole block must call
// this together.
__device__ inline int list_exact(const std::uint32_t* wide, const std::uint32_t* for_all,
                                 ExactToken* list) {
  int count = 0;
  for (int w = 0; w < kMostTile / 32; ++w) {
    const std::uint32_t bits = wide[w] | for_all[w];
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < 32 && (bits >> thread & 1u) != 0) {
      std::uint32_t before = bits & ((1u << thread) - 1);
      int at = count;
      for (; before != 0; before &= before - 1) ++at;
      list[at].lane = 32 * w + thread;
      list[at].for_all = (for_all[w] >> thread & 1u) != 0;
    }
    for (std::uint32_t left = bits; left != 0; left &= left - 1) ++count;
  }
  return count;
}

// The mixture at a token. `rare`: the token needs the log domain. A whole warp must call this
// together.
template <Dtype D>
__device__ MixtureToken<double> exact_mixture(const LossCall& call, std::int64_t position,
                                              std::int64_t v, double z0, double& q, bool& rare) {
  double total[2] = {0.0, 0.0};
  for (std::int64_t i = lane_id(); i < call.in.shape.models; i += kWarp) {
    const Projected<double> own =
        projected_at(model_row<D>(call.in, call.weights, i, position), v, z0);
    total[0] += own.excess;
    total[1] += own.ratio;
  }
  warp_reduce(total, Add{});
  q = exp_(z0 - call.in.public_lse[position]);
  const Projected<double> mean{total[0] / call.all.slots,
                               (total[1] + call.all.absent) / call.all.slots};
  return mixture_token(call.all, q, mean, rare);
}

template <Dtype D>
__device__ void add_exact_token(const LossCall& call, std::int64_t position, std::int64_t model,
                                std::int64_t v, const ExactToken& token, const ModelSums& to) {
  const ModelRow<D> row = model_row<D>(call.in, call.weights, model, position);
  const ExcessToken<double> x =
      excess_without<D>(call, position, static_cast<int>(model), v, token.z0,
                        projected_at(row, v, token.z0), token.mixture);
  to.first() += x.p * x.x;
  to.listed_second() += x.p * x.x * x.x;
  const LogParts<double> log = log_parts(x.x, x.X);
  for (int k = 0; k < call.orders.count; ++k) {
    const double order = call.orders.value[k];
    double forward = 0.0, reverse = 0.0;
    if (call.orders.integer[k] != 0) {
      add_excess(x, call.orders.integer[k], forward, reverse);
    } else {
      add_excess(x, log, order, forward, reverse);
    }
    ListedSums& sums = to.listed(k);
    sums.forward += forward;
    sums.reverse += reverse;
    // x times the derivative of (1+x)^s - 1 - s x is at most this for s = order and s = 1 - order.
    // For an order near 1, fmax puts 2 in its place, as is needed near x = 0.
    sums.slope += std::fmax(order, 2.0) * (forward + reverse) * std::fmax(1.0, 1.0 / x.X);
  }
}

// Adds the listed tokens to the models' sums, which this block has written, and returns their part
// of the balance. `served` becomes false if a token is too rare. A whole block must call this
// together.
template <Dtype D>
__device__ double add_exact_tokens(const LossCall& call, int degree, std::int64_t position,
                                   std::int64_t begin, const TileMemory& tile,
                                   const std::uint32_t* for_all, double* sums, bool& served) {
  ExactToken* list = tile.list;
  const int count = list_exact(tile.wide, for_all, list);
  if (count == 0) return 0.0;  // the same for every thread of the block
  __syncthreads();
  const auto* public_row = row_bits<D>(call.in.public_logits, 0, position);
  double rare_tokens = 0.0;
  for (int j = warp_id(); j < count; j += warp_count()) {
    const std::int64_t v = begin + list[j].lane;
    const double z0 = logit<D>(public_row, v);
    double q = 0.0;
    bool rare = false;
    const MixtureToken<double> mixture = exact_mixture<D>(call, position, v, z0, q, rare);
    if (rare) rare_tokens = 1.0;
    if (lane_id() == 0) {
      list[j].z0 = z0;
      list[j].balance = list[j].for_all ? q * mixture.mean.excess : 0.0;
      list[j].mixture = mixture;
    }
  }
  served = block_max(rare_tokens) == 0.0;  // its barrier also completes the list
  if (!served) return 0.0;
  for (std::int64_t i = threadIdx.x; i < call.in.shape.models; i += blockDim.x) {
    const ModelSums to{sums + i * call.floats.per_model, degree};
    const float* own = tile.deviations + i * call.floats.pitch();
    for (int j = 0; j < count; ++j) {
      const ExactToken& token = list[j];
      const float t = tile.token(token.lane).t(own[token.lane]);
      if (!token.for_all && std::fabs(t) <= 1.0f) continue;
      add_exact_token<D>(call, position, i, begin + token.lane, token, to);
    }
  }
  double balance = 0.0;
  for (int j = 0; j < count; ++j) balance += list[j].balance;
  return balance;
}

ADAPMIXED_CORE_END
