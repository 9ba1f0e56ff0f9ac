// Large targets: solves rows in double from the short lists that the first kernel has left.
#pragma once

#include "project/cuda_block_lists.cuh"
#include "project/cuda_block_row.cuh"
#include "project/cuda_call.cuh"
#include "project/row_search.h"

ADAPMIXED_CORE_BEGIN

// Few threads, because lists have some hundred tokens. Many blocks then overlap their waiting.
constexpr int kSolveThreads = 64;

// The lists for solve_lists (project/row_search.h), made for the smaller of its two shares. log_q,
// t: shared memory of kListCapacity doubles each.
template <Dtype D>
class StoredLists {
 public:
  using Row = BlockRow<ListTokens>;

  __device__ StoredLists(const RowPair<D>& pair, const RowLists& stored, double order,
                         double log_target, double* log_q, double* t)
      : pair_(pair),
        stored_(stored),
        order_(order),
        log_target_(log_target),
        log_q_(log_q),
        t_(t) {}

  __device__ void set_unlisted(double) {}
  __device__ bool list_forward() { return made_[0] || make(0); }
  __device__ bool list_reverse() { return made_[1] || make(1); }
  __device__ const Row& forward() const { return rows_[0]; }
  __device__ const Row& reverse() const { return rows_[1]; }

 private:
  __device__ bool make(int way) {
    int end = used_;
    for (int warp = 0; warp < kScanWarps; ++warp) {
      const int count = stored_.count[way][warp];
      if (count > kSegment || count > kListCapacity - end) return false;
      for (int k = static_cast<int>(threadIdx.x); k < count; k += static_cast<int>(blockDim.x)) {
        const std::int64_t v = stored_.tokens[way][warp][k];
        const double z0 = logit<D>(pair_.public_row, v);
        log_q_[end + k] = z0 - pair_.public_lse;
        t_[end + k] = logit<D>(pair_.private_row, v) - z0 - pair_.shift;
      }
      end += count;
    }
    __syncthreads();
    rows_[way] = Row({log_q_ + used_, t_ + used_, end - used_}, order_);
    if (way == 0) rows_[way].survey(log_target_);
    used_ = end;
    made_[way] = true;
    return true;
  }

  const RowPair<D>& pair_;
  const RowLists& stored_;
  double order_, log_target_;
  double *log_q_, *t_;
  int used_ = 0;
  bool made_[2] = {false, false};
  Row rows_[2];
};

template <Dtype D>
__global__ void __launch_bounds__(kSolveThreads, 1)
    project_lists_kernel(const __grid_constant__ ProjectCall call) {
  const RowAt at = row_at(call);
  if (!call.found[at.row]) return;
  __shared__ double log_q[kListCapacity], t[kListCapacity];
  const double lse = call.out.private_lse[at.at], public_lse = call.in.public_lse[at.position];
  const RowPair<D> pair{row_bits<D>(call.in.private_logits, at.model, at.position),
                        row_bits<D>(call.in.public_logits, 0, at.position), call.in.shape.vocab,
                        public_lse, lse - public_lse};
  StoredLists<D> lists(pair, call.lists[at.row], call.order, (call.order - 1.0) * call.radius,
                       log_q, t);
  Point found{0.0, 1.0};
  const bool solved =
      solve_lists(lists, call.order, call.radius, double_ratio_error(lse, public_lse), found);
  if (solved && threadIdx.x == 0) set_weight(call, at, found);
}

ADAPMIXED_CORE_END
