// p = mean_i p_bar_i: one thread per token. A second kernel checks the sums of the positions,
// because a kernel cannot raise an error for rows that do not belong to the projection. Single
// log-probabilities: one warp per position, whose lanes share the models.
#include "common/block.cuh"
#include "common/launch.cuh"
#include "mixture/cuda_check.cuh"
#include "mixture/cuda_projected.cuh"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN

template <Dtype D>
__global__ void mixture_kernel(const __grid_constant__ Ensemble in,
                               const __grid_constant__ Weights weights, unsigned blocks_a_row,
                               double* probabilities, double* block_sums) {
  const std::int64_t position = blockIdx.x / blocks_a_row;
  const std::int64_t v = blockIdx.x % blocks_a_row * kMixtureThreads + threadIdx.x;
  double p = 0.0;
  if (v < in.shape.vocab) {
    const double z0 = logit<D>(row_bits<D>(in.public_logits, 0, position), v);
    const double lq = z0 - in.public_lse[position];
    if (lq < kWildLogQ) {
      p = rare_mean(in, weights, position, v);
    } else {
      p = tame_probability(lq) * mean_projected<D>(in, weights, position, v, z0).ratio;
    }
    probabilities[position * in.shape.vocab + v] = p;
  }
  p = block_sum(p);
  if (threadIdx.x == 0) block_sums[blockIdx.x] = p;
}

static __global__ void log_prob_kernel(Ensemble in, Weights weights, const std::int64_t* targets,
                                       double* result) {
  const std::int64_t b = warp_of_grid();
  if (b >= in.shape.positions) return;  // true for the whole warp
  const std::int64_t v = targets[b];
  const bool inside = v >= 0 && v < in.shape.vocab;
  // A NaN may have no part in the sum, but must make the result NaN.
  bool good =
      inside && std::isfinite(in.public_lse[b]) && row_of(in.public_logits, 0, b).at(v) < HUGE_VAL;
  double total[1] = {-HUGE_VAL};
  for (std::int64_t i = lane_id(); good && i < in.shape.models; i += kWarp) {
    good = admissible(in, weights, i * in.shape.positions + b);
    total[0] = LogAdd{}(total[0], log_projected(in, weights, i, b, v));
  }
  if (!good) total[0] = NAN;  // makes every sum with it NaN
  warp_reduce(total, LogAdd{});
  if (lane_id() != 0) return;
  const double found = total[0] - std::log(static_cast<double>(in.shape.models));
  result[b] = found <= kMostLogProb ? found : NAN;
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

std::int64_t mixture_workspace(const Shape& shape) {
  return shape.positions * mixture_blocks(shape) * static_cast<std::int64_t>(sizeof(double));
}

void mixture(const Ensemble& in, const Weights& weights, double* probabilities,
             const Queue& queue) {
  const DeviceGuard guard(queue);
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch_mixture(queue, device::mixture_kernel<decltype(dtype)::value>, in.shape, probabilities,
                   in, weights);
  });
}

void log_prob(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
              double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  launch_warps(queue, device::log_prob_kernel, in.shape.positions, in, weights, targets, result);
}

}  // namespace adapmixed::cuda
