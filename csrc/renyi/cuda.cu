// D_alpha(P || Q) and D_alpha(Q || P) of pairs of rows, for orders in [1, inf]. One block takes one
// pair. It reads the rows once for all orders, and once or twice more for each order.
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "renyi/formula.h"

ADAPMIXED_CORE_BEGIN

struct DivergenceOrders {
  double order[kMaxOrders];
  int count;
};

template <Dtype D>
struct TwoRows {
  const typename Bits<D>::type* p;
  const typename Bits<D>::type* q;
  double p_lse, q_lse;
  std::int64_t vocab;

  // Calls visit(token) for every token of this thread.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for_each_token<D>(p, vocab, [&](std::int64_t v, float z) {
      visit(token_pair<double>(z, logit<D>(q, v), p_lse, q_lse));
    });
  }
};

// Results in both directions. A whole block must call the functions below together.
struct BothWays {
  double forward, backward;
};

// The facts about a pair that do not depend on the order.
struct PairFacts {
  bool p_alone, q_alone;  // a token exists that only this row has
  double outside;         // P of the tokens that q lacks
  BothWays largest;       // the largest log-ratios, over the tokens that q has
};

template <Dtype D>
__device__ PairFacts pair_facts(const TwoRows<D>& x) {
  double found[4] = {-HUGE_VAL, -HUGE_VAL, 0.0, 0.0};
  double outside = 0.0;
  for_each_token<D>(x.p, x.vocab, [&](std::int64_t v, float z) {
    const double zp = z, zq = logit<D>(x.q, v);
    const TokenPair<double> token = token_pair(zp, zq, x.p_lse, x.q_lse);
    found[0] = vmax(signed_log_ratio(token, 1.0), found[0]);
    found[1] = vmax(signed_log_ratio(token, -1.0), found[1]);
    if (only_first(zp, zq)) {
      found[2] = 1.0;
      outside += exp_(zp - x.p_lse);
    }
    if (only_first(zq, zp)) found[3] = 1.0;
  });
  block_reduce(found, Max{});
  return {found[2] != 0.0,
          found[3] != 0.0,
          block_sum(outside),
          {std::fmax(found[0], 0.0), std::fmax(found[1], 0.0)}};
}

template <Dtype D>
__device__ BothWays relative_entropies(const TwoRows<D>& x, double outside) {
  double total[2] = {0.0, 0.0};
  x.for_each([&](const TokenPair<double>& token) {
    total[0] += entropy_term(token, true);
    total[1] += entropy_term(token, false);
  });
  block_sum(total);
  return {entropy_of_terms(total[0], outside), entropy_of_terms(total[1], outside)};
}

// The divergence from the largest log_term and the sum of the terms; s = order or 1 - order.
__device__ inline double divergence_of_sum(double top, double total, double outside, double s,
                                           double order) {
  if (top == HUGE_VAL) return HUGE_VAL;
  return top > kLogDomainFrom ? divergence_of_log(top + std::log(total), order)
                              : divergence_of_terms(total, outside, s, order);
}

template <Dtype D>
__device__ BothWays divergences(const TwoRows<D>& x, double outside, double order) {
  const double reverse = 1.0 - order;
  double top[2] = {-HUGE_VAL, -HUGE_VAL};
  x.for_each([&](const TokenPair<double>& token) {
    top[0] = vmax(log_term(token, order), top[0]);
    top[1] = vmax(log_term(token, reverse), top[1]);
  });
  block_reduce(top, Max{});
  const auto term = [](const TokenPair<double>& token, double s, double largest) {
    return largest > kLogDomainFrom ? exp_(log_term(token, s) - largest) : excess_term(token, s);
  };
  double total[2] = {0.0, 0.0};
  x.for_each([&](const TokenPair<double>& token) {
    total[0] += term(token, order, top[0]);
    total[1] += term(token, reverse, top[1]);
  });
  block_sum(total);
  return {divergence_of_sum(top[0], total[0], outside, order, order),
          divergence_of_sum(top[1], total[1], outside, reverse, order)};
}

constexpr int kDivergenceThreads = 512;

template <Dtype D>
__global__ void __launch_bounds__(kDivergenceThreads, 1)
    renyi_divergence_kernel(Ensemble in, DivergenceOrders orders, double* forward,
                            double* backward) {
  const std::int64_t k = blockIdx.x;
  const TwoRows<D> x{row_bits<D>(in.private_logits, 0, k), row_bits<D>(in.public_logits, 0, k),
                     in.private_lse[k], in.public_lse[k], in.shape.vocab};
  // Without both log-sum-exps every divergence is +inf.
  const bool good = std::isfinite(x.p_lse) && std::isfinite(x.q_lse);
  PairFacts facts{true, true, 0.0, {0.0, 0.0}};
  if (good) facts = pair_facts(x);
  for (int j = 0; j < orders.count; ++j) {
    const double order = orders.order[j];
    BothWays found = facts.largest;
    if (good && order == 1.0) {
      found = relative_entropies(x, facts.outside);
    } else if (good && order < HUGE_VAL) {
      found = divergences(x, facts.outside, order);
    }
    if (threadIdx.x == 0) {
      forward[k * orders.count + j] = facts.p_alone ? HUGE_VAL : found.forward;
      backward[k * orders.count + j] = facts.q_alone ? HUGE_VAL : found.backward;
    }
  }
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

static void renyi_divergence(const Ensemble& in, const double* orders, std::int64_t num_orders,
                             double* forward, double* backward, const Queue& queue) {
  if (num_orders > kMaxOrders) throw std::runtime_error("renyi_divergence: too many orders");
  device::DivergenceOrders values{};
  values.count = static_cast<int>(num_orders);
  for (int j = 0; j < values.count; ++j) values.order[j] = orders[j];
  const DeviceGuard guard(queue);
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch(queue, device::renyi_divergence_kernel<decltype(dtype)::value>,
           grid_of(in.shape.positions), dim3(device::kDivergenceThreads), 0, in, values, forward,
           backward);
  });
}

void add_renyi_divergence(Table& table) { table.renyi_divergence = renyi_divergence; }

}  // namespace adapmixed::cuda
