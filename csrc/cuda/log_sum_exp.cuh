// lse = log sum_v exp(z_v) of every row, and what is wrong with a row that has none: one block a
// row, which is read twice.
#pragma once

#include "core/elementary.h"
#include "cuda/block.cuh"
#include "cuda/load.cuh"

ADAPMIXED_CORE_BEGIN

struct RowSum {
  double lse;
  std::int32_t status;
};

// Called by a whole block.
template <Dtype D>
__device__ RowSum row_sum(const typename Bits<D>::type* row, std::int64_t vocab) {
  double found[2] = {-HUGE_VAL, 0.0};  // the largest logit; 1 where there is a NaN
  for_each_token<D>(row, 0, vocab, [&](std::int64_t, float z) {
    const double x = z;
    if (x > found[0]) found[0] = x;
    if (x != x) found[1] = 1.0;
  });
  block_reduce(found, Max{});
  const double largest = found[0];
  if (found[1] != 0.0) return {NAN, kRowNan};
  if (largest == HUGE_VAL) return {NAN, kRowPlusInf};
  if (largest == -HUGE_VAL) return {NAN, kRowEmpty};
  if (std::fabs(largest) > kMaxLogit) return {NAN, kRowTooLarge};
  double total = 0.0;
  for_each_token<D>(row, 0, vocab, [&](std::int64_t, float z) { total += exp_(z - largest); });
  return {largest + std::log(block_sum(total)), kRowOk};
}

template <Dtype D>
__global__ void log_sum_exp_kernel(Logits logits, std::int64_t positions, std::int64_t vocab,
                                   double* lse, std::int32_t* status) {
  const std::int64_t k = blockIdx.x;
  const RowSum sum = row_sum<D>(row_bits<D>(logits, k / positions, k % positions), vocab);
  if (threadIdx.x == 0) {
    lse[k] = sum.lse;
    status[k] = sum.status;
  }
}

ADAPMIXED_CORE_END
