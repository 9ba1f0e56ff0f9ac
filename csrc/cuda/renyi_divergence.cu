#include "cuda/renyi_divergence.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace core = adapmixed::ADAPMIXED_ISA;

void renyi_divergence(const Ensemble& in, const double* orders, std::int64_t num_orders,
                      double* forward, double* backward, const Queue& queue) {
  if (num_orders > kMaxOrders) throw std::runtime_error("renyi_divergence: too many orders");
  core::DivergenceOrders values{};
  values.count = static_cast<int>(num_orders);
  for (int j = 0; j < values.count; ++j) values.order[j] = orders[j];
  const DeviceGuard guard(queue);
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch(queue, core::renyi_divergence_kernel<decltype(dtype)::value>,
           grid_of(in.shape.positions), dim3(core::kDivergenceThreads), 0, in, values, forward,
           backward);
  });
}

}  // namespace adapmixed::cuda
