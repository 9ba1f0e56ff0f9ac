// The excess sums of every model over one tile of the vocabulary in double, for every input. The
// formulas are those of leave_one_out/formula.h.
//
// First each thread finds the numbers that all models share at its token and reads the models'
// logits once. Then each warp takes models in turn and computes their terms at all tokens of the
// tile; the logits are in the cache by now. Only one warp touches the sums of a model, so no
// barrier is needed in between. Tokens that need the log domain are only marked here; see
// cuda_rare.cuh.
#pragma once

#include "common/block.cuh"
#include "leave_one_out/cuda_call.cuh"
#include "mixture/cuda_projected.cuh"

ADAPMIXED_CORE_BEGIN

// One model's sums over one tile, spread over the lanes of a warp: lane k holds the excesses of
// order k.
struct LaneSums {
  double forward, reverse;
  double gained;  // each lane holds a part of the balance

  // Adds the parts of the excesses of order k that the lanes bring.
  __device__ void add(int k, double forward_part, double reverse_part) {
    double parts[2] = {forward_part, reverse_part};
    warp_reduce(parts, Add{});
    if (lane_id() == k) {
      forward += parts[0];
      reverse += parts[1];
    }
  }
};

// A whole warp must call this together. `fresh`: nothing has been stored yet.
__device__ inline void store_sums(const LossCall& call, std::int64_t model, const LaneSums& sums,
                                  bool fresh, double* chunk_sums) {
  if (lane_id() < call.orders.count) {
    double* out = chunk_sums + call.sums_at(model, lane_id());
    out[0] = fresh ? sums.forward : out[0] + sums.forward;
    out[1] = fresh ? sums.reverse : out[1] + sums.reverse;
  }
  double gained[1] = {sums.gained};
  warp_reduce(gained, Add{});
  if (lane_id() == 0) {
    double* out = chunk_sums + call.balance_at(model);
    *out = fresh ? gained[0] : *out + gained[0];
  }
}

struct LossTile {
  double q[kLossTile];  // 0 if the token is wild, or past the end
  double p[kLossTile];  // the mixture; 0 also if the mixture is rare
  double mean_excess[kLossTile], mean_ratio[kLossTile], scale[kLossTile];
  float z0[kLossTile];
};

// Adds the q of a tile to the chunk's. A whole warp must call this together.
__device__ inline void store_mass(const LossTile& tile, bool fresh, double& mass) {
  double total[1] = {0.0};
  for (int k = lane_id(); k < kLossTile; k += kWarp) total[0] += tile.q[k];
  warp_reduce(total, Add{});
  if (lane_id() == 0) mass = fresh ? total[0] : mass + total[0];
}

// A whole block must call this together. It sets a bit of `rare_lanes` for each token that is left
// to the log domain.
template <Dtype D>
__device__ void load_tile(const LossCall& call, std::int64_t position, std::int64_t begin,
                          std::int64_t end, LossTile& tile, std::uint32_t* rare_lanes) {
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t v = begin + lane;
  double q = 0.0;
  float z0 = 0.0f;
  MixtureToken<double> token{};
  bool rare = false;
  if (v < end) {
    z0 = logit<D>(row_bits<D>(call.in.public_logits, 0, position), v);
    const double lq = z0 - call.in.public_lse[position];
    if (lq < kWildLogQ) {
      rare = true;
    } else {
      q = tame_probability(lq);
      const Projected<double> present = mean_projected<D>(call.in, call.weights, position, v, z0);
      token = mixture_token(call.all, q, with_absent(call.all, present), rare);
    }
  }
  tile.z0[lane] = z0;
  tile.q[lane] = q;
  tile.p[lane] = token.p;
  tile.mean_excess[lane] = token.mean.excess;
  tile.mean_ratio[lane] = token.mean.ratio;
  tile.scale[lane] = token.scale;
  const unsigned lanes = __ballot_sync(kAllLanes, rare);
  if (lane_id() == 0) rare_lanes[warp_id()] = lanes;
}

// The sum of the other models' p_bar / q.
template <Dtype D>
__device__ double rest_of_slots(const LossCall& call, std::int64_t position, int model,
                                std::int64_t v, double z0) {
  double rest = call.all.absent;
#pragma unroll 1  // the registers are full with the token that is being summed
  for (int j = 0; j < call.in.shape.models; ++j) {
    if (j == model) continue;
    rest += projected_at(model_row<D>(call.in, call.weights, j, position), v, z0).ratio;
  }
  return rest;
}

constexpr int kLaneTokens = kLossTile / kWarp;  // that a lane adds of a tile

// x of one model at one token, from its p_bar / q and the numbers that all models share there.
template <Dtype D>
__device__ ExcessToken<double> excess_without(const LossCall& call, std::int64_t position,
                                              int model, std::int64_t v, double z0,
                                              const Projected<double>& own,
                                              const MixtureToken<double>& mixture) {
  bool dominated = false;
  NeighbourToken<double> neighbour = neighbour_token(call.all, mixture, own, dominated);
  // A token with p = 0 adds nothing, and may lie past the end of the rows.
  if (dominated && mixture.p != 0.0) {
    const double rest = rest_of_slots<D>(call, position, model, v, z0);
    neighbour.X = ratio_from_rest(call.all, rest, mixture.total);
  }
  return excess_token(neighbour);
}

// Adds a lane's tokens: first all integer orders, then the others, so that no registers are kept
// for both kinds.
__device__ inline void add_excesses(const LossOrders& orders,
                                    const ExcessToken<double> (&tokens)[kLaneTokens],
                                    LaneSums& sums) {
  for (int k = 0; k < orders.count; ++k) {
    if (orders.integer[k] == 0) continue;
    double forward = 0.0, reverse = 0.0;
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      add_excess(tokens[j], orders.integer[k], forward, reverse);
    }
    sums.add(k, forward, reverse);
  }
  if (orders.all_integer) return;
  LogParts<double> logs[kLaneTokens];
#pragma unroll
  for (int j = 0; j < kLaneTokens; ++j) logs[j] = log_parts(tokens[j].x, tokens[j].X);
  for (int k = 0; k < orders.count; ++k) {
    if (orders.integer[k] != 0) continue;
    double forward = 0.0, reverse = 0.0;
#pragma unroll
    for (int j = 0; j < kLaneTokens; ++j) {
      add_excess(tokens[j], logs[j], orders.value[k], forward, reverse);
    }
    sums.add(k, forward, reverse);
  }
}

// Adds all tokens of the tile that begins at `begin`, those kWarp apart to each lane.
template <Dtype D>
__device__ void add_tokens(const LossCall& call, std::int64_t position, int model,
                           const ModelRow<D>& row, std::int64_t begin, const LossTile& tile,
                           LaneSums& sums) {
  ExcessToken<double> tokens[kLaneTokens];
#pragma unroll
  for (int k = 0; k < kLaneTokens; ++k) {
    const int at = lane_id() + k * kWarp;
    const double q = tile.q[at], z0 = tile.z0[at];
    // A token with q = 0 may lie past the end of the row, so it is not read.
    const Projected<double> own =
        row.projected_from(q == 0.0 ? 0.0 : row.log_ratio(begin + at, z0));
    sums.gained += q * own.excess;
    const Projected<double> mean{tile.mean_excess[at], tile.mean_ratio[at]};
    tokens[k] =
        excess_without<D>(call, position, model, begin + at, z0, own,
                          {tile.p[at], slots_total(call.all, mean.ratio), mean, tile.scale[at]});
  }
  __syncwarp();  // for speed alone: all lanes start the long part together
  add_excesses(call.orders, tokens, sums);
}

ADAPMIXED_CORE_END
