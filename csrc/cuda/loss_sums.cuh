// What a warp has summed of one model, and how it gets to the workspace.
#pragma once

#include "cuda/block.cuh"
#include "cuda/loss_call.cuh"

ADAPMIXED_CORE_BEGIN

// One model's sums over one tile, in the lanes of a warp: the excesses of order k in lane k.
struct LaneSums {
  double forward, reverse;
  double gained;  // in every lane another part of the balance

  // Every lane brings a part of the excesses of order k.
  __device__ void add(int k, double forward_part, double reverse_part) {
    double parts[2] = {forward_part, reverse_part};
    warp_reduce(parts, Add{});
    if (lane_id() == k) {
      forward += parts[0];
      reverse += parts[1];
    }
  }
};

// Called by a whole warp. `fresh`: nothing has been stored yet.
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

ADAPMIXED_CORE_END
