// lambda_i = max{lambda : D<->_alpha(lambda p_i + (1-lambda) q || q) <= R} and lse_i of every row:
// one block a row. All threads of a block search together: each evaluates its tokens, and all see
// the same sums.
#pragma once

#include "core/row_search.h"
#include "cuda/block_lists.cuh"
#include "cuda/block_row.cuh"
#include "cuda/log_sum_exp.cuh"
#include "cuda/project_call.cuh"
#include "cuda/row_pair.cuh"

ADAPMIXED_CORE_BEGIN

// As many threads as have the registers that the search wants.
constexpr int kProjectThreads = 256;

// Called by a whole block. ratio_error: of p/q, relative. kLists: for scaled targets only, which
// are served without, too, but slowly.
template <Dtype D, bool kLists>
__device__ Point project_row(const RowPair<D>& pair, double order, double radius,
                             double ratio_error) {
  if (pair.uncovers()) return {0.0, 1.0};
  const double log_target = (order - 1.0) * radius;
  if constexpr (kLists) {
    __shared__ double log_q[kListCapacity], t[kListCapacity];
    BlockLists<D> lists(pair, order, log_target, log_q, t);
    Point found{0.0, 1.0};
    if (solve_lists(lists, order, radius, ratio_error, found)) return found;
  }
  BlockRow<RowPair<D>> row(pair, order);
  row.survey(log_target);
  return solve_whole(row, order, radius, ratio_error);
}

// What a first attempt has left, or, where there was none, every row.
template <Dtype D, bool kLists>
__global__ void __launch_bounds__(kProjectThreads, 1)
    project_kernel(const __grid_constant__ ProjectCall call) {
  const RowAt at = row_at(call);
  if (call.done != nullptr && call.done[at.row]) return;
  const std::int64_t vocab = call.in.shape.vocab;
  const auto* row = row_bits<D>(call.in.private_logits, at.model, at.position);
  const RowSum sum = row_sum<D>(row, vocab);
  const double public_lse = call.in.public_lse[at.position];
  const bool public_ok = std::isfinite(public_lse);
  Point found{0.0, 1.0};
  if (sum.status == kRowOk && public_ok) {
    const RowPair<D> pair{row, row_bits<D>(call.in.public_logits, 0, at.position), vocab,
                          public_lse, sum.lse - public_lse};
    found = project_row<D, kLists>(pair, call.order, call.radius,
                                   double_ratio_error(sum.lse, public_lse));
  }
  if (threadIdx.x == 0) {
    call.out.weight[at.at] = found.weight;
    call.out.complement[at.at] = found.complement;
    call.out.private_lse[at.at] = sum.lse;
    call.out.status[at.at] = public_ok ? sum.status : kRowPublic;
  }
}

ADAPMIXED_CORE_END
