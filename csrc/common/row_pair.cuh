// One private row and its public row, read by a block as log q and t = log p/q.
#pragma once

#include "common/block.cuh"
#include "common/load.cuh"

ADAPMIXED_CORE_BEGIN

template <Dtype D>
struct RowPair {
  using Word = typename Bits<D>::type;

  const Word* private_row;
  const Word* public_row;
  std::int64_t vocab;
  double public_lse;
  double shift;  // private lse - public lse

  // Calls visit(log q, t) for every token of this thread. A token that the public row masks has log
  // q = -inf, and t = +inf if the private row has it.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) {
      const double z = logit<D>(private_row, v), z0 = logit<D>(public_row, v);
      visit(z0 - public_lse, z - z0 - shift);
    }
  }
};

ADAPMIXED_CORE_END
