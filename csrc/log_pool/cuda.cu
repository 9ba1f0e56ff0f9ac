// p(v) ~ q(v) exp((kappa/N) sum_i u_i(v)), u_i(v) = clip(log p_i(v) - log q(v), a, b).
// log_pool/formula.h has the derivation and the rounding. cuda_kernel.cuh has the kernels of the
// pool. They keep the weight of each token, so `mixture` of the pool needs no row. A pool without
// these weights reads the rows again.
#include <cstdint>
#include <limits>

#include "common/block.cuh"
#include "common/launch.cuh"
#include "log_pool/cuda_kernel.cuh"
#include "log_pool/cuda_look.cuh"
#include "log_pool/formula.h"
#include "mixture/cuda_check.cuh"

ADAPMIXED_CORE_BEGIN

// The sum of u_i of the models first, first + step, ... at one token with q > 0. NaN if an active
// row has no log-sum-exp, or holds a NaN or +inf here.
__device__ inline double summed_log_ratio(const PoolGrid& grid, const Ensemble& in,
                                          const LogPoolOptions& options, std::int64_t position,
                                          std::int64_t v, double z0, int first, int step) {
  double sum = 0.0;
#pragma unroll 4
  for (std::int64_t i = first; i < in.shape.models; i += step) {
    const std::int64_t at = i * in.shape.positions + position;
    if (!takes_part(options, at)) continue;
    const bool good = std::fabs(in.private_lse[at]) < HUGE_VAL;
    sum += good ? pooled_log_ratio(grid, in, i, position, v, z0) : NAN;
  }
  return sum;
}

// p at one token for each thread, from the pool's own sums. NaN if `log_normaliser` is not theirs.
static __global__ void pool_probabilities_kernel(const double* log_weights,
                                                 const double* log_normaliser,
                                                 std::int64_t positions, std::int64_t vocab,
                                                 unsigned blocks_a_row, double* probabilities) {
  const std::int64_t position = blockIdx.x / blocks_a_row;
  const std::int64_t v = blockIdx.x % blocks_a_row * kPoolThreads + threadIdx.x;
  if (v >= vocab) return;
  const double given = log_normaliser[position], own = log_weights[positions * vocab + position];
  const double log_p = log_weights[position * vocab + v] - given;
  const bool good = std::fabs(given - own) <= kMixtureTolerance;
  probabilities[position * vocab + v] = good ? exp_(log_p) : NAN;
}

// The same from the rows, and the sum of each block.
static __global__ void pool_mixture_kernel(const __grid_constant__ Ensemble in,
                                           const __grid_constant__ PoolGrid grid,
                                           const __grid_constant__ LogPoolOptions options,
                                           const double* log_normaliser, unsigned blocks_a_row,
                                           double* probabilities, double* block_sums) {
  const std::int64_t position = blockIdx.x / blocks_a_row, vocab = in.shape.vocab;
  const std::int64_t v = blockIdx.x % blocks_a_row * kPoolThreads + threadIdx.x;
  double p = 0.0;
  if (v < vocab) {
    const double z0 = row_of(in.public_logits, 0, position).at(v);
    const double sum =
        z0 > -HUGE_VAL ? summed_log_ratio(grid, in, options, position, v, z0, 0, 1) : 0.0;
    const double log_p =
        grid.log_weight(sum, z0 - in.public_lse[position]) - log_normaliser[position];
    p = log_p < HUGE_VAL ? exp_(log_p) : NAN;
    probabilities[position * vocab + v] = p;
  }
  p = block_sum(p);
  if (threadIdx.x == 0) block_sums[blockIdx.x] = p;
}

// Single log-probabilities: one warp per position, whose lanes share the models.
static __global__ void pool_log_prob_kernel(const __grid_constant__ Ensemble in, PoolGrid grid,
                                            const __grid_constant__ LogPoolOptions options,
                                            const double* log_normaliser,
                                            const std::int64_t* targets, double* result) {
  const std::int64_t b = warp_of_grid();
  if (b >= in.shape.positions) return;  // true for the whole warp
  const std::int64_t v = targets[b];
  const bool inside = v >= 0 && v < in.shape.vocab;
  const double z0 = inside ? row_of(in.public_logits, 0, b).at(v) : NAN;
  double sum[1] = {z0 > -HUGE_VAL ? summed_log_ratio(grid, in, options, b, v, z0, lane_id(), kWarp)
                                  : 0.0};
  warp_reduce(sum, Add{});
  if (lane_id() != 0) return;
  const double found = grid.log_weight(sum[0], z0 - in.public_lse[b]) - log_normaliser[b];
  result[b] = found <= kMostLogProb ? found : NAN;
}

ADAPMIXED_CORE_END

namespace adapmixed::cuda {

namespace device = adapmixed::ADAPMIXED_ISA;

// The workspace holds PoolMemory's arrays.
static std::int64_t log_pool_workspace(const Shape& shape) {
  const device::RowParts cut(shape.positions, 1 + shape.models, shape.vocab);
  const std::int64_t parts = sizeof(device::RowPart) * cut.rows * cut.count;
  const std::int64_t tiles = sizeof(device::PoolTile) * device::kPoolWarps * mixture_blocks(shape);
  return shape.positions * (parts + tiles + static_cast<std::int64_t>(sizeof(unsigned)));
}

// How many tiles a block takes. More leave fewer blocks that add up the parts of all rows, which
// takes about a quarter of a tile's time. But the blocks should fill the GPU, all of them or none.
static std::int64_t tiles_of_a_block(std::int64_t positions, std::int64_t tiles) {
  const std::int64_t room = multiprocessors() * device::kPoolBlocks;
  std::int64_t best = 1, least = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t each = 1; each <= 8; ++each) {
    const std::int64_t blocks = positions * ((tiles + each - 1) / each);
    const std::int64_t time = (blocks + room - 1) / room * (4 * each + 1);
    if (time < least) best = each, least = time;
  }
  return best;
}

static void log_pool(const LogPoolInputs& in, const LogPoolOptions& options,
                     const LogPoolResults& out, const Queue& queue) {
  const DeviceGuard guard(queue);
  const Shape& shape = in.shape;
  const device::RowParts cut(shape.positions, 1 + shape.models, shape.vocab, true);
  const std::int64_t tiles = mixture_blocks(shape);
  const std::int64_t each = tiles_of_a_block(shape.positions, tiles);
  device::PoolMemory memory{};
  memory.parts = static_cast<device::RowPart*>(queue.workspace);
  memory.tiles = reinterpret_cast<device::PoolTile*>(memory.parts + cut.parts());
  memory.counters =
      reinterpret_cast<unsigned*>(memory.tiles + shape.positions * tiles * device::kPoolWarps);
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    launch_row_parts<kDtype>(queue, in.private_logits, in.public_logits, cut,
                             device::PoolLook<kDtype>{memory.counters}, memory.parts);
    launch(queue, device::pool_sums_kernel<kDtype>,
           grid_of(shape.positions * ((tiles + each - 1) / each)), dim3(device::kPoolThreads),
           device::pool_shared_bytes<kDtype>(), in, device::PoolGrid(options), options, cut, memory,
           static_cast<int>(tiles), static_cast<int>(each), out);
  });
}

static void pool_probabilities(const double* log_weights, const double* log_normaliser,
                               std::int64_t positions, std::int64_t vocab, double* probabilities,
                               const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t blocks = mixture_blocks({1, positions, vocab});
  launch(queue, device::pool_probabilities_kernel, grid_of(positions * blocks),
         dim3(device::kPoolThreads), 0, log_weights, log_normaliser, positions, vocab,
         static_cast<unsigned>(blocks), probabilities);
}

static void pool_mixture(const Ensemble& in, const LogPoolOptions& options,
                         const double* log_normaliser, double* probabilities, const Queue& queue) {
  const DeviceGuard guard(queue);
  launch_mixture(queue, device::pool_mixture_kernel, in.shape, 1, probabilities, in,
                 device::PoolGrid(options), options, log_normaliser);
}

static void pool_log_prob(const Ensemble& in, const LogPoolOptions& options,
                          const double* log_normaliser, const std::int64_t* targets, double* result,
                          const Queue& queue) {
  const DeviceGuard guard(queue);
  launch_warps(queue, device::pool_log_prob_kernel, in.shape.positions, in,
               device::PoolGrid(options), options, log_normaliser, targets, result);
}

void add_log_pool(Table& table) {
  table.log_pool = log_pool;
  table.pool_mixture = pool_mixture;
  table.pool_log_prob = pool_log_prob;
  table.pool_probabilities = pool_probabilities;
  table.log_pool_workspace = log_pool_workspace;
}

}  // namespace adapmixed::cuda
