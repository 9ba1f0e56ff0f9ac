// One private row beside its public one, as a block reads them: by log q and t = log p/q.
#pragma once

#include "common/block.cuh"
#include "common/load.cuh"

ADAPMIXED_CORE_BEGIN

template <Dtype D>
struct RowPair {
  static constexpr bool kWild = true;
  using Word = typename Bits<D>::type;

  const Word* private_row;
  const Word* public_row;
  std::int64_t vocab;
  double public_lse;
  double shift;  // private lse - public lse

  // visit(log q, t) for every token of this thread. Where the public row has no token log q = -inf,
  // and t = +inf if the private row has it.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for (std::int64_t v = threadIdx.x; v < vocab; v += blockDim.x) {
      const double z = logit<D>(private_row, v), z0 = logit<D>(public_row, v);
      visit(z0 - public_lse, z - z0 - shift);
    }
  }

  // Whether the public row masks a token that the private one does not: no lambda > 0 is feasible.
  // Called by a whole block.
  __device__ bool uncovers() const {
    double uncovered = 0.0;
    for_each([&](double, double t) {
      if (t == HUGE_VAL) uncovered = 1.0;
    });
    return block_max(uncovered) != 0.0;
  }
};

ADAPMIXED_CORE_END
