// D_alpha(P || Q) and D_alpha(Q || P) of pairs of rows (renyi/formula.h). One block takes one pair
// and reads its rows once for every few orders.
#include "common/launch.cuh"
#include "common/row_parts.cuh"
#include "renyi/formula.h"

ADAPMIXED_CORE_BEGIN

struct DivergenceOrders {
  double order[kMaxOrders];
  int count;
};

constexpr int kDivergenceThreads = 512;

// Adds this thread's tokens.
template <Dtype D, int kOrders>
__device__ void add_rows(const typename Bits<D>::type* p, const typename Bits<D>::type* q,
                         int vocab, PairSums<float, kOrders>& sums) {
  constexpr int kLoads = 4;
  const int stride = static_cast<int>(blockDim.x) * kLoads;
  for (int v = warp_id() * kWarp * kLoads + lane_id(); v < vocab; v += stride) {
    float z[kLoads], z0[kLoads];
    load_tokens<D>(p + v, vocab - v, z);
    load_tokens<D>(q + v, vocab - v, z0);
    unsigned odd = 0;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (!sums.add(z[k], z0[k]) && v + k * kWarp < vocab) odd |= 1u << k;
    }
    sums.widen();
    // Read again: registers have no index.
#pragma unroll 1
    for (; odd != 0; odd &= odd - 1) {
      const int at = v + (__ffs(static_cast<int>(odd)) - 1) * kWarp;
      sums.add_exactly(static_cast<double>(logit<D>(p, at)), static_cast<double>(logit<D>(q, at)));
    }
  }
}

template <Dtype D, int kOrders>
__global__ void __launch_bounds__(kDivergenceThreads, 1)
    renyi_divergence_kernel(const __grid_constant__ Ensemble in,
                            const __grid_constant__ DivergenceOrders orders, double* forward,
                            double* backward) {
  const std::int64_t pair = blockIdx.x;
  const PairShift x(in.private_lse[pair], in.public_lse[pair]);
  for (int first = 0; first < orders.count; first += kOrders) {
    PairSums<float, kOrders> of(x, orders.order, first, orders.count);
    add_rows<D>(row_bits<D>(in.private_logits, 0, pair), row_bits<D>(in.public_logits, 0, pair),
                static_cast<int>(in.shape.vocab), of);
    double sums[PairSums<float, kOrders>::kSize];
    of.get(sums);
    block_sum(sums);
#pragma unroll
    for (int k = 0; k < kOrders; ++k) {
      if (threadIdx.x != 0 || first + k >= orders.count) continue;
      const double order = orders.order[first + k];
      const std::int64_t to = pair * orders.count + first + k;
      forward[to] = divergence_above(sums[1], sums[3 + 2 * k], sums[0], order, x);
      backward[to] = divergence_above(sums[2], sums[4 + 2 * k], sums[0], order, x);
    }
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

static void renyi_divergence(const Ensemble& in, const double* orders, std::int64_t num_orders,
                             double* forward, double* backward, const Queue& queue) {
  device::DivergenceOrders values{};
  values.count = static_cast<int>(num_orders);
  for (int j = 0; j < values.count; ++j) values.order[j] = orders[j];
  const DeviceGuard guard(queue);
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    const auto kernel = values.count == 1 ? device::renyi_divergence_kernel<kDtype, 1>
                                          : device::renyi_divergence_kernel<kDtype, 2>;
    launch(queue, kernel, grid_of(in.shape.positions), dim3(device::kDivergenceThreads), 0, in,
           values, forward, backward);
  });
}

void add_renyi_divergence(Table& table) { table.renyi_divergence = renyi_divergence; }

}  // namespace adapmixed::cuda
