// p = mean_i p_bar_i: a few threads for each token, which share the models. A second kernel checks
// the sums of the positions, because a kernel cannot raise an error for rows that do not belong to
// the projection. Single log-probabilities: one warp per position, whose lanes share the models.
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "mixture/formula.h"

ADAPMIXED_CORE_BEGIN

// The largest log-probability that rounding explains. A larger one shows that the rows do not
// belong to the log-sum-exps.
constexpr double kMostLogProb = 1e-6;
// A row whose sum is further from 1 is not the mixture of these rows.
constexpr double kMixtureTolerance = 1e-6;

constexpr int kMixtureThreads = 256;
constexpr int kMixtureShares = 4;
constexpr int kMixtureLoads = 4;  // models whose logits are on their way together

// What one model adds at a token with logit z: s p, clipped if there is a box, and a share of q.
struct Addend {
  double p, share;
};
__device__ inline Addend addend(const Ensemble& in, const Weights& weights, std::int64_t at,
                                double z, double q) {
  const double weight = weights.weight[at], rest = rest_of(weights, at);
  const double log_p = z - in.private_lse[at];
  if (log_p != log_p) return {log_p, 0.0};  // a NaN shows in the sums
  if (!(weights.upper > 0.0)) return {weight * exp_(log_p), rest};
  if (weights.active != nullptr && !weights.active[at]) return {0.0, 1.0};
  if (z < least_clipped(in.private_lse[at])) return {0.0, rest};
  return {vmin(weights.upper * q, vmax(weights.lower * q, exp_(log_p + weight))), 0.0};
}

template <Dtype D>
__global__ void __launch_bounds__(kMixtureThreads* kMixtureShares, 1)
    mixture_kernel(const __grid_constant__ Ensemble in, const __grid_constant__ Weights weights,
                   unsigned blocks_a_row, double* probabilities, double* block_sums) {
  __shared__ double sums[kMixtureShares][kMixtureThreads];
  const std::int64_t position = blockIdx.x / blocks_a_row, models = in.shape.models;
  const int token = threadIdx.x % kMixtureThreads, share = threadIdx.x / kMixtureThreads;
  const std::int64_t v = blockIdx.x % blocks_a_row * kMixtureThreads + token;
  const bool inside = v < in.shape.vocab;
  double total = 0.0;
  if (inside) {
    const double z0 = logit<D>(row_bits<D>(in.public_logits, 0, position), v);
    const double q = exp_(z0 - in.public_lse[position]);  // of a NaN inf, which shows, too
    const std::int64_t each = (models + kMixtureShares - 1) / kMixtureShares;
    const std::int64_t end = share * each + each < models ? share * each + each : models;
    double shares = 0.0;
    for (std::int64_t first = share * each; first < end; first += kMixtureLoads) {
      float z[kMixtureLoads];
#pragma unroll
      for (int k = 0; k < kMixtureLoads; ++k) {
        const std::int64_t i = first + k < end ? first + k : first;
        z[k] = logit<D>(row_bits<D>(in.private_logits, i, position), v);
      }
#pragma unroll
      for (int k = 0; k < kMixtureLoads; ++k) {
        if (first + k >= end) break;
        const Addend own =
            addend(in, weights, (first + k) * in.shape.positions + position, z[k], q);
        total += own.p;
        shares += own.share;
      }
    }
    total = vfma(shares, q, total);
  }
  sums[share][token] = total;
  __syncthreads();
  double p = 0.0;
  if (inside && share == 0) {
    for (int k = 1; k < kMixtureShares; ++k) total += sums[k][token];
    p = total / static_cast<double>(models);
    probabilities[position * in.shape.vocab + v] = p;
  }
  p = block_sum(p);
  if (threadIdx.x == 0) block_sums[blockIdx.x] = p;
}

// A thread takes one token, as in the kernel that wrote the probabilities and the sum of each of
// its blocks.
static __global__ void check_mixture_kernel(std::int64_t vocab, unsigned blocks_a_row,
                                            const double* block_sums, double* probabilities) {
  const std::int64_t position = blockIdx.x / blocks_a_row;
  const std::int64_t v = blockIdx.x % blocks_a_row * kMixtureThreads + threadIdx.x;
  double total = 0.0;
  for (unsigned k = threadIdx.x; k < blocks_a_row; k += kMixtureThreads) {
    total += block_sums[position * blocks_a_row + k];
  }
  total = block_sum(total);
  if (std::fabs(total - 1.0) <= kMixtureTolerance || v >= vocab) return;
  probabilities[position * vocab + v] = NAN;
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

// Blocks of a row.
static std::int64_t mixture_blocks(const Shape& shape) {
  return (shape.vocab + device::kMixtureThreads - 1) / device::kMixtureThreads;
}

static std::int64_t mixture_workspace(const Shape& shape) {
  return shape.positions * mixture_blocks(shape) * static_cast<std::int64_t>(sizeof(double));
}

static void mixture(const Ensemble& in, const Weights& weights, double* probabilities,
                    const Queue& queue) {
  const DeviceGuard guard(queue);
  const auto blocks = static_cast<unsigned>(mixture_blocks(in.shape));
  const dim3 grid = grid_of(in.shape.positions * blocks);
  auto* sums = static_cast<double*>(queue.workspace);
  with_dtype(in.private_logits.dtype, [&](auto dtype) {
    launch(queue, device::mixture_kernel<decltype(dtype)::value>, grid,
           dim3(device::kMixtureThreads * device::kMixtureShares), 0, in, weights, blocks,
           probabilities, sums);
  });
  launch(queue, device::check_mixture_kernel, grid, dim3(device::kMixtureThreads), 0,
         in.shape.vocab, blocks, sums, probabilities);
}

static void log_prob(const Ensemble& in, const Weights& weights, const std::int64_t* targets,
                     double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  launch_warps(queue, device::log_prob_kernel, in.shape.positions, in, weights, targets, result);
}

void add_mixture(Table& table) {
  table.mixture = mixture;
  table.log_prob = log_prob;
  table.mixture_workspace = mixture_workspace;
}

}  // namespace adapmixed::cuda
