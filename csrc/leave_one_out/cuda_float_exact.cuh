// Sums in double the tokens of a tile that single precision leaves out. A warp per token finds the
// numbers that all models share; then a thread takes a model at a token.
#pragma once

#include "leave_one_out/cuda_call.cuh"
#include "leave_one_out/cuda_sums.cuh"

ADAPMIXED_CORE_BEGIN

// The mixture at a token, and q. `far_below`: it may be far below q, and the mean of p_bar / q - 1
// does not tell that of p_bar / q. `rare`: the token needs the log domain. A whole warp must call
// this together.
template <Dtype D>
__device__ MixtureToken<double> exact_mixture(const LossCall& call, std::int64_t member,
                                              std::int64_t v, double z0, bool far_below, double& q,
                                              bool& rare) {
  const std::int64_t position = call.first + member;
  const int models = static_cast<int>(call.in.shape.models);
  double total[2] = {0.0, 0.0};
  Projected<double> first{0.0, 1.0};  // identical models have exactly their own value as mean
  if (far_below) {
    first = projected_at(model_row<D>(call.in, call.weights, 0, position), v, z0);
    for (int i = lane_id(); i < models; i += kWarp) {
      const Projected<double> own =
          projected_at(model_row<D>(call.in, call.weights, i, position), v, z0);
      total[0] += own.excess - first.excess;
      total[1] += own.ratio - first.ratio;
    }
  } else {
    const DoubleModel* of_models = call.doubles + member * models;
    const auto* column = row_bits<D>(call.in.private_logits, 0, position) + v;
    for (int i = lane_id(); i < models; i += kWarp) {
      total[0] += of_models[i].delta(logit<D>(column, i * call.in.private_logits.stride_model), z0);
    }
  }
  warp_reduce(total, Add{});
  if (!far_below) total[1] = total[0];
  q = exp_(z0 - call.in.public_lse[position]);
  const Projected<double> present{mean_from(first.excess, total[0], models),
                                  mean_from(first.ratio, total[1], models)};
  const Projected<double> mean = with_absent(call.all, present);
  return mixture_token(call.all, q, mean, rare);
}

// Adds the excesses of one model at one token. Returns whether they are within the range of the
// sums.
template <Dtype D>
__device__ bool add_exact_token(const LossCall& call, std::int64_t position, std::int64_t model,
                                std::int64_t v, const ExactToken& token,
                                const ModelTotals& totals) {
  const ModelRow<D> row = model_row<D>(call.in, call.weights, model, position);
  const ExcessToken<double> x =
      excess_without<D>(call, position, static_cast<int>(model), v, token.z0,
                        projected_at(row, v, token.z0), token.mixture);
  const double first = x.p * x.x, second = first * x.x;
  if (!(std::fabs(first) < WideSum::kLimit && second < WideSum::kLimit)) return false;
  totals.firsts[model].add(first);
  totals.seconds[model].add(second);
  LogParts<double> log{};
  if (!call.orders.all_integer) log = log_parts(x.x, x.X);
  ListedTotals* listed = totals.listed + model * totals.orders;
  for (int k = 0; k < call.orders.count; ++k, ++listed) {
    const double order = call.orders.value[k];
    double forward = 0.0, reverse = 0.0;
    if (call.orders.integer[k] != 0) {
      add_excess(x, call.orders.integer[k], forward, reverse);
    } else {
      add_excess(x, log, order, forward, reverse);
    }
    // x times the derivative of (1+x)^s - 1 - s x is at most this for s = order and s = 1 - order.
    // For an order near 1, fmax puts 2 in its place, as is needed near x = 0.
    const double slope = std::fmax(order, 2.0) * (forward + reverse) * std::fmax(1.0, 1.0 / x.X);
    if (!(slope < WideSum::kLimit)) return false;
    listed->excess[0].add(forward);
    listed->excess[1].add(reverse);
    listed->slope.add(slope);
  }
  return true;
}

// The tokens of a tile that are summed in double, in order. `wide`: only for models with |t| > 1.
struct ListedTokens {
  std::uint32_t wide[kFloatWarps], for_all[kFloatWarps];  // bits, a word for each warp's tokens

  __device__ int count() const {
    int total = 0;
#pragma unroll
    for (int w = 0; w < kFloatWarps; ++w) total += __popc(wide[w] | for_all[w]);
    return total;
  }
  // The lane in the tile of number n.
  __device__ int lane(int n) const {
    int w = 0;
    std::uint32_t bits = wide[0] | for_all[0];
    for (int here = __popc(bits); n >= here; here = __popc(bits)) {
      n -= here;
      ++w;
      bits = wide[w] | for_all[w];
    }
    for (; n > 0; --n) bits &= bits - 1;
    return w * kWarp + __ffs(static_cast<int>(bits)) - 1;
  }
  __device__ bool is_for_all(int lane) const {
    return (for_all[lane / kWarp] >> lane % kWarp & 1u) != 0;
  }
};

// Finds what all models share at up to kWarp listed tokens from number `first` on, each by one
// warp, the last warps first. Returns whether none is rare. A whole warp must call this together.
template <Dtype D>
__device__ bool share_listed(const LossCall& call, std::int64_t member, std::int64_t begin,
                             const TileMemory& tile, const ListedTokens& listed, int first,
                             int count) {
  const auto* public_row = row_bits<D>(call.in.public_logits, 0, call.first + member);
  bool served = true;
  const int end = count - first < kWarp ? count : first + kWarp;
  for (int n = first + kFloatWarps - 1 - warp_id(); n < end; n += kFloatWarps) {
    const int lane = listed.lane(n);
    const std::int64_t v = begin + lane;
    const double z0 = logit<D>(public_row, v);
    const bool for_all = listed.is_for_all(lane);
    double q = 0.0;
    bool rare = false;
    const MixtureToken<double> mixture = exact_mixture<D>(call, member, v, z0, for_all, q, rare);
    served = served && !rare;
    if (lane_id() != 0) continue;
    tile.list[n - first] = {lane, z0, mixture};
    if (!for_all) continue;
    const double gained = q * mixture.mean.excess;
    if (std::fabs(gained) < WideSum::kLimit && mixture.p < WideSum::kLimit) {
      call.totals[member].mass.add(mixture.p);
      call.totals[member].balance.add(gained);
    } else {
      served = false;
    }
  }
  return served;
}

// Pairs of a listed token and a model that one warp has found and not yet added: number of the
// token, lane of the model.
struct PairQueue {
  std::uint16_t pairs[2 * kWarp];
};

// Adds the tokens on the list. Returns whether their terms are within range. A whole warp must call
// this together.
template <Dtype D>
__device__ bool add_listed(const LossCall& call, std::int64_t position, std::int64_t begin,
                           const TileMemory& tile, const ListedTokens& listed, int count,
                           PairQueue& queue, const ModelTotals& totals) {
  const int models = static_cast<int>(call.in.shape.models), pitch = call.floats.pitch();
  bool served = true;
  for (int first = warp_id() * kWarp; first < models; first += kFloatThreads) {
    const int i = first + lane_id();
    const float* own = tile.deviations + (i < models ? i : 0) * pitch;
    int waiting = 0;
    const auto add = [&](int pairs) {
      __syncwarp();
      if (lane_id() < pairs) {
        const int pair = queue.pairs[lane_id()];
        const ExactToken& token = tile.list[pair / kWarp];
        served = add_exact_token<D>(call, position, first + pair % kWarp, begin + token.lane, token,
                                    totals) &&
                 served;
      }
      __syncwarp();
    };
    for (int n = 0; n < count; ++n) {
      const int lane = tile.list[n].lane;
      const bool takes =
          listed.is_for_all(lane) || !(std::fabs(tile.token(lane).t(own[lane])) <= 1.0f);
      const unsigned all = __ballot_sync(kAllLanes, i < models && takes);
      if (all >> lane_id() & 1u) {
        queue.pairs[waiting + __popc(all & ((1u << lane_id()) - 1u))] =
            static_cast<std::uint16_t>(n * kWarp + lane_id());
      }
      waiting += __popc(all);
      if (waiting < kWarp) continue;
      add(kWarp);
      waiting -= kWarp;
      if (lane_id() < waiting) queue.pairs[lane_id()] = queue.pairs[kWarp + lane_id()];
      __syncwarp();
    }
    add(waiting);
  }
  return served;
}

ADAPMIXED_CORE_END
