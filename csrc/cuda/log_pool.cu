#include "cuda/log_pool.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace core = adapmixed::ADAPMIXED_ISA;

namespace {

std::int64_t blocks_a_row(const Shape& shape) {
  return (shape.vocab + core::kPoolThreads - 1) / core::kPoolThreads;
}

}  // namespace

// The sums over the models.
std::int64_t log_pool_workspace(const Shape& shape) {
  return shape.positions * shape.vocab * static_cast<std::int64_t>(sizeof(double));
}

void log_pool(const StepInputs& in, const LogPoolOptions& options, const LogPoolResults& out,
              const Queue& queue) {
  const DeviceGuard guard(queue);
  const Shape& shape = in.shape;
  const core::PoolGrid grid(options);
  const dim3 threads(core::kPoolThreads);
  log_sum_exp(in.public_logits, 1, shape.positions, shape.vocab, out.public_lse, out.public_status,
              queue);
  const Ensemble ensemble{shape, in.private_logits, in.public_logits, out.private_lse,
                          out.public_lse};
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    launch(queue, core::pool_row_kernel<kDtype>, grid_of(shape.models * shape.positions), threads,
           0, in, grid, out);
    auto* sums = static_cast<double*>(queue.workspace);
    const std::int64_t blocks = blocks_a_row(shape);
    launch(queue, core::pool_sum_kernel<kDtype>, grid_of(shape.positions * blocks), threads, 0,
           ensemble, grid, options, blocks, sums);
    launch(queue, core::pool_normaliser_kernel<kDtype>, grid_of(shape.positions), threads, 0,
           ensemble, grid, static_cast<const double*>(sums), out.log_normaliser);
  });
}

void pool_mixture(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                  double* probabilities, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t blocks = blocks_a_row(in.shape);
  const dim3 threads(core::kPoolThreads);
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    launch(queue, core::pool_mixture_kernel<decltype(dtype)::value>,
           grid_of(in.shape.positions * blocks), threads, 0, in, core::PoolGrid(options), options,
           log_normaliser, blocks, probabilities);
  });
  launch(queue, core::check_mixture_kernel, grid_of(in.shape.positions), threads, 0, in.shape.vocab,
         probabilities);
}

}  // namespace adapmixed::cuda
