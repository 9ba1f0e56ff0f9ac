#include "cuda/log_prob.cuh"

#include "cuda/launch.h"

namespace adapmixed::cuda {

namespace core = adapmixed::ADAPMIXED_ISA;

void log_prob(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
              double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t blocks = (in.shape.positions + core::kLogProbWarps - 1) / core::kLogProbWarps;
  launch(queue, core::log_prob_kernel, grid_of(blocks), dim3(core::kLogProbWarps * core::kWarp), 0,
         in, weights, targets, result);
}

void pool_log_prob(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                   const std::int64_t* targets, double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t blocks = (in.shape.positions + core::kLogProbWarps - 1) / core::kLogProbWarps;
  launch(queue, core::pool_log_prob_kernel, grid_of(blocks),
         dim3(core::kLogProbWarps * core::kWarp), 0, in, core::PoolGrid(options), options,
         log_normaliser, targets, result);
}

}  // namespace adapmixed::cuda
