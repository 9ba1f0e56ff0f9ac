// Checks of weights, and that rows belong to the log-sum-exps: for mixtures, pools and losses.
#pragma once

#include "common/block.cuh"
#include "common/launch.cuh"

ADAPMIXED_CORE_BEGIN

// The largest log-probability that rounding explains. A larger one shows that the rows do not
// belong to the log-sum-exps.
constexpr double kMostLogProb = 1e-6;
// A row whose sum is further from 1 is not the mixture of these rows.
constexpr double kMixtureTolerance = 1e-6;

constexpr int kMixtureThreads = 256;

// Returns whether a row has a log-sum-exp and valid weights; NaN fails every comparison.
__device__ inline bool admissible(const Ensemble& in, const Weights& weights, std::int64_t at) {
  const double weight = weights.weight[at], complement = weights.complement[at];
  if (weights.upper > 0.0) {
    return weight > -HUGE_VAL && complement >= weights.lower && complement <= weights.upper &&
           std::fabs(in.private_lse[at]) < HUGE_VAL;
  }
  return weight >= 0.0 && weight <= 1.0 && complement >= 0.0 && complement <= 1.0 &&
         std::fabs(weight + complement - 1.0) <= 1e-9 && std::fabs(in.private_lse[at]) < HUGE_VAL;
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

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

// Blocks of a row, each for so many tokens.
inline std::int64_t mixture_blocks(const Shape& shape) {
  constexpr std::int64_t kThreads = ADAPMIXED_ISA::kMixtureThreads;
  return (shape.vocab + kThreads - 1) / kThreads;
}

// Queues kernel(arguments..., blocks of a row, probabilities, their sum in each block), so many
// threads a token, and the check of these sums. They are kept in the workspace.
template <class... P, class... A>
void launch_mixture(const Queue& queue, void (*kernel)(P...), const Shape& shape, int shares,
                    double* probabilities, A... arguments) {
  const std::int64_t blocks = mixture_blocks(shape);
  const dim3 grid = grid_of(shape.positions * blocks), threads(ADAPMIXED_ISA::kMixtureThreads);
  auto* sums = static_cast<double*>(queue.workspace);
  const auto blocks_a_row = static_cast<unsigned>(blocks);
  launch(queue, kernel, grid, dim3(threads.x * shares), 0, arguments..., blocks_a_row,
         probabilities, sums);
  launch(queue, ADAPMIXED_ISA::check_mixture_kernel, grid, threads, 0, shape.vocab, blocks_a_row,
         sums, probabilities);
}

}  // namespace adapmixed::cuda
