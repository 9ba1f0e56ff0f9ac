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
#include "common/quad.cuh"
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

// A whole block must call this together. It sets a bit of `rare_lanes` for each token that is left
// to the log domain.
template <Dtype D>
__device__ void load_tile(const LossCall& call, std::int64_t position, std::int64_t begin,
                          std::int64_t end, LossTile& tile, std::uint32_t* rare_lanes) {
  const int lane = static_cast<int>(threadIdx.x);
  const std::int64_t v = begin + lane;
  double q = 0.0;
  MixtureToken<double> token{};
  bool rare = false;
  if (v < end) {
    const float z0 = logit<D>(row_bits<D>(call.in.public_logits, 0, position), v);
    tile.z0[lane] = z0;
    const double lq = z0 - call.in.public_lse[position];
    if (lq < kWildLogQ) {
      rare = true;
    } else {
      q = tame_probability(lq);
      const Projected<double> present = mean_projected<D>(call.in, call.weights, position, v, z0);
      token = mixture_token(call.all, q, with_absent(call.all, present), rare);
    }
  }
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

// First all integer orders, then the others, so that no registers are kept for both kinds.
__device__ inline void add_excesses(const LossOrders& orders, const ExcessToken<Quad>& token,
                                    LaneSums& sums) {
  for (int k = 0; k < orders.count; ++k) {
    if (orders.integer[k] == 0) continue;
    Quad forward(0.0), reverse(0.0);
    add_excess(token, orders.integer[k], forward, reverse);
    sums.add(k, sum(forward), sum(reverse));
  }
  if (orders.all_integer) return;
  const LogParts<Quad> log = log_parts(token.x, token.X);
  for (int k = 0; k < orders.count; ++k) {
    if (orders.integer[k] != 0) continue;
    Quad forward(0.0), reverse(0.0);
    add_excess(token, log, orders.value[k], forward, reverse);
    sums.add(k, sum(forward), sum(reverse));
  }
}

// Adds all tokens of the tile that begins at `begin`, four per lane.
template <Dtype D>
__device__ void add_tokens(const LossCall& call, std::int64_t position, int model,
                           const ModelRow<D>& row, std::int64_t begin, const LossTile& tile,
                           LaneSums& sums) {
  static_assert(kLossTile == kWarp * Quad::kLanes, "one quad covers the tile");
  const int lane = lane_id();
  Quad q, t;
#pragma unroll
  for (int k = 0; k < Quad::kLanes; ++k) {
    const int at = lane + k * kWarp;
    q.v[k] = tile.q[at];
    // A token with q = 0 may lie past the end of the row, so it is not read.
    t.v[k] = q.v[k] == 0.0 ? 0.0 : row.log_ratio(begin + at, tile.z0[at]);
  }
  const Projected<Quad> own = row.projected_from(t);
  sums.gained += sum(q * own.excess);
  MixtureToken<Quad> shared;
#pragma unroll
  for (int k = 0; k < Quad::kLanes; ++k) {
    const int at = lane + k * kWarp;
    shared.p.v[k] = tile.p[at];
    shared.mean.excess.v[k] = tile.mean_excess[at];
    shared.mean.ratio.v[k] = tile.mean_ratio[at];
    shared.scale.v[k] = tile.scale[at];
  }
  shared.total = slots_total(call.all, shared.mean.ratio);
  QuadMask dominated;
  NeighbourToken<Quad> neighbour = neighbour_token(call.all, shared, own, dominated);
#pragma unroll
  for (int k = 0; k < Quad::kLanes; ++k) {
    // A token with p = 0 adds nothing, and may lie past the end of the rows.
    if (!dominated.v[k] || shared.p.v[k] == 0.0) continue;
    const int at = lane + k * kWarp;
    const double rest = rest_of_slots<D>(call, position, model, begin + at, tile.z0[at]);
    neighbour.X.v[k] = ratio_from_rest(call.all, rest, shared.total.v[k]);
  }
  __syncwarp();  // for speed alone: all lanes start the long part together
  add_excesses(call.orders, excess_token(neighbour), sums);
}

ADAPMIXED_CORE_END
