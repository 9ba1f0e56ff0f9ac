// p(v) ~ q(v) exp((kappa/N) sum_i u_i(v)), u_i(v) = clip(log p_i(v) - log q(v), a, b).
// log_pool/formula.h has the derivation and the rounding.
//
// The pool takes two kernels. The first reads all rows for their log-sum-exps and the extremes of
// their log-ratios (common/row_parts.cuh). The second reads them again, in the opposite order of
// positions, as the last rows may still be in the L2 cache. It adds up the models at each token,
// and its last block of a position takes the normaliser. `mixture` of the pool then needs no row.
//
// Sums of u_i are exact integers, so warps share the models. All else is added in a fixed order.
#include "common/block.cuh"
#include "common/launch.cuh"
#include "common/load.cuh"
#include "common/row_parts.cuh"
#include "log_pool/formula.h"
#include "mixture/cuda_check.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kPoolThreads = kMixtureThreads;
constexpr int kPoolWarps = kPoolThreads / kWarp;
constexpr int kPoolTile = kPoolThreads;         // tokens of a block: in the end a thread takes one
constexpr int kPoolTokens = kPoolTile / kWarp;  // tokens of a lane, while it adds up models

// The weights of one tile of tokens, relative to the largest. NaN if a row is bad.
struct PoolTile {
  double largest, total;
};

// What the kernels of one call leave each other.
struct PoolMemory {
  RowPart* parts;      // (B, 1 + N, parts of a row)
  PoolTile* tiles;     // (B, tiles)
  unsigned* counters;  // (B), of finished tiles
};

// What a pool looks for in its first read: the extremes of z - z_0 over the tokens with q > 0.
// Clears the position's counter for the second.
struct PoolLook {
  using Other = double;
  struct Found {
    double low = HUGE_VAL, high = -HUGE_VAL;
  };

  unsigned* counters;

  __device__ Other other(float z0) const { return z0 == -HUGE_VALF ? NAN : z0; }
  __device__ void see(Found& found, float z, Other z0) const {
    const double difference = z - z0;
    found.low = vmin(difference, found.low);  // NaN changes nothing
    found.high = vmax(difference, found.high);
  }
  __device__ void leave(Found&, std::int64_t) const {}
  __device__ void finish(const Found& found, RowPart& part) const {
    double extremes[2] = {-found.low, found.high};
    warp_reduce(extremes, Max{});
    part.low = -extremes[0], part.high = extremes[1];
  }
  template <Dtype D>
  __device__ void finish_public(const typename Bits<D>::type*, int, RowPart&) const {}
  __device__ void begin(std::int64_t position) const { counters[position] = 0; }
};

// A row of logits from a tile's first token on, and its PoolGrid::origin.
template <Dtype D>
struct PooledRow {
  const typename Bits<D>::type* logits;
  double origin;
};

// Writes the results of one private row.
__device__ inline void write_row(const PoolGrid& grid, const RowSum& sum, double public_lse,
                                 const RowPart* parts, int count, std::int64_t at,
                                 const LogPoolResults& out) {
  double low = HUGE_VAL, high = -HUGE_VAL;
  for (int k = 0; k < count; ++k) {
    low = vmin(parts[k].low, low);
    high = vmax(parts[k].high, high);
  }
  const double origin = grid.origin(sum.lse, public_lse);
  const bool public_ok = std::isfinite(public_lse);
  out.span[at] = sum.status == kRowOk && public_ok
                     ? grid.span(grid.position(low, origin), grid.position(high, origin))
                     : NAN;
  out.private_lse[at] = sum.lse;
  out.status[at] = public_ok ? sum.status : kRowPublic;
}

// Adds the clipped log-ratios of some rows, as the bits of their positions, to the sums of a lane.
// A warp takes every kPoolWarps-th row, a lane every kWarp-th of `size` tokens.
template <Dtype D, bool kWhole>
__device__ void add_rows(const PoolGrid& grid, const PooledRow<D>* rows, int count,
                         const double* public_logits, int size, std::uint64_t* sums) {
  typename Bits<D>::type next[kPoolTokens];
  const auto load = [&](int i) {
    const auto* own = rows[i].logits + lane_id();
#pragma unroll
    for (int k = 0; k < kPoolTokens; ++k) {
      const bool there = kWhole || k * kWarp + lane_id() < size;
      next[k] = there ? own[k * kWarp] : Bits<D>::kMasked;
    }
  };
  if (warp_id() < count) load(warp_id());
#pragma unroll 1
  for (int i = warp_id(); i < count; i += kPoolWarps) {
    double x[kPoolTokens];
#pragma unroll
    for (int k = 0; k < kPoolTokens; ++k) x[k] = float_of<D>(next[k]) - public_logits[k];
    const double origin = rows[i].origin;
    // The next row is on its way while this one is added.
    if (i + kPoolWarps < count) load(i + kPoolWarps);
    __syncwarp();  // for speed alone: loads are not moved beyond it
#pragma unroll
    for (int k = 0; k < kPoolTokens; ++k) x[k] = grid.position(x[k], origin);
#pragma unroll
    for (int k = 0; k < kPoolTokens; ++k) x[k] = grid.clipped(x[k]);
#pragma unroll
    for (int k = 0; k < kPoolTokens; ++k) sums[k] += bit_cast<std::uint64_t>(x[k]);
  }
}

// One block takes one tile of one position.
template <Dtype D>
__global__ void __launch_bounds__(kPoolThreads, 2)
    pool_sums_kernel(const __grid_constant__ LogPoolInputs in,
                     const __grid_constant__ PoolGrid grid,
                     const __grid_constant__ LogPoolOptions options,
                     const __grid_constant__ RowParts cut,
                     const __grid_constant__ PoolMemory memory, unsigned tiles,
                     const __grid_constant__ LogPoolResults out) {
  __shared__ PooledRow<D> rows[kPoolThreads];
  __shared__ double shared_lse;
  __shared__ std::uint64_t partial[kPoolWarps][kPoolTile];
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned tile = blockIdx.x % tiles;
  const std::int64_t position = in.shape.positions - 1 - blockIdx.x / tiles;
  const std::int64_t begin = static_cast<std::int64_t>(tile) * kPoolTile;
  const int size = static_cast<int>(in.shape.vocab - begin < kPoolTile ? in.shape.vocab - begin
                                                                       : std::int64_t{kPoolTile});
  const auto* public_row = row_bits<D>(in.public_logits, 0, position) + begin;

  double public_lse = 0.0, public_logits[kPoolTokens];
  std::uint64_t sums[kPoolTokens] = {};
  int bad = 0;
#pragma unroll
  for (int k = 0; k < kPoolTokens; ++k) {
    const int v = k * kWarp + lane_id();
    public_logits[k] = v < size ? logit<D>(public_row, v) : 0.0f;
  }
  for (int first = 0; first < cut.rows; first += kPoolThreads) {
    const int row = first + thread;
    const std::int64_t at = (row - 1) * in.shape.positions + position;
    const RowPart* parts = memory.parts + (position * cut.rows + row) * cut.count;
    RowSum sum{};
    if (row < cut.rows) sum = row_sum<1>(parts, cut.count);
    if (row == 0) {
      shared_lse = sum.lse;
      if (tile == 0) {
        out.public_lse[position] = sum.lse;
        out.public_status[position] = sum.status;
      }
    }
    __syncthreads();
    public_lse = shared_lse;
    // The public row stands for itself and for rows without a part in the pool: its u_i are 0.
    rows[thread] = {public_row, kGridZero};
    if (row > 0 && row < cut.rows) {
      if (tile == 0) write_row(grid, sum, public_lse, parts, cut.count, at, out);
      if (takes_part(options, at)) {
        rows[thread] = {row_bits<D>(in.private_logits, row - 1, position) + begin,
                        grid.origin(sum.lse, public_lse)};
        bad |= sum.status != kRowOk;
      }
    }
    __syncthreads();
    const int count = cut.rows - first < kPoolThreads ? cut.rows - first : kPoolThreads;
    if (size == kPoolTile) {
      add_rows<D, true>(grid, rows, count, public_logits, size, sums);
    } else {
      add_rows<D, false>(grid, rows, count, public_logits, size, sums);
    }
    __syncthreads();  // the next rows take their place
  }
#pragma unroll
  for (int k = 0; k < kPoolTokens; ++k) partial[warp_id()][k * kWarp + lane_id()] = sums[k];
  bad |= !std::isfinite(public_lse);
  bad = __syncthreads_or(bad) != 0;

  double log_weight = -HUGE_VAL;
  if (thread < size) {
    // kGridZero plus the units of all rows.
    std::uint64_t bits =
        bit_cast<std::uint64_t>(kGridZero) * static_cast<std::uint64_t>(1 - cut.rows);
    for (int w = 0; w < kPoolWarps; ++w) bits += partial[w][thread];
    const double sum = grid.nats(bit_cast<double>(bits));
    log_weight = grid.log_weight(sum, logit<D>(public_row, thread) - public_lse);
    out.log_weights[position * in.shape.vocab + begin + thread] = log_weight;
  }
  const double largest = block_max(log_weight);
  const double total = block_sum(largest > -HUGE_VAL ? exp_(log_weight - largest) : 0.0);
  PoolTile* all = memory.tiles + position * tiles;
  if (thread == 0) all[tile] = {largest, bad ? NAN : total};
  if (!is_last_block(memory.counters + position, tiles)) return;

  double most = -HUGE_VAL, weight = 0.0;
  for (unsigned k = thread; k < tiles; k += kPoolThreads) most = vmax(all[k].largest, most);
  most = block_max(most);
  for (unsigned k = thread; k < tiles; k += kPoolThreads) {
    weight += all[k].total * exp_(all[k].largest - most);
  }
  weight = block_sum(weight);
  if (thread != 0) return;
  const double found = most + std::log(weight);
  out.log_normaliser[position] = found;
  out.log_weights[in.shape.positions * in.shape.vocab + position] = found;
}

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
std::int64_t log_pool_workspace(const Shape& shape) {
  const device::RowParts cut(shape.positions, 1 + shape.models, shape.vocab);
  const std::int64_t parts = sizeof(device::RowPart) * cut.rows * cut.count;
  const std::int64_t tiles = sizeof(device::PoolTile) * mixture_blocks(shape);
  return shape.positions * (parts + tiles + static_cast<std::int64_t>(sizeof(unsigned)));
}

void log_pool(const LogPoolInputs& in, const LogPoolOptions& options, const LogPoolResults& out,
              const Queue& queue) {
  const DeviceGuard guard(queue);
  const Shape& shape = in.shape;
  const device::RowParts cut(shape.positions, 1 + shape.models, shape.vocab);
  const std::int64_t tiles = mixture_blocks(shape);
  device::PoolMemory memory{};
  memory.parts = static_cast<device::RowPart*>(queue.workspace);
  memory.tiles = reinterpret_cast<device::PoolTile*>(memory.parts + cut.parts());
  memory.counters = reinterpret_cast<unsigned*>(memory.tiles + shape.positions * tiles);
  with_dtype(in.public_logits.dtype, [&](auto dtype) {
    constexpr Dtype kDtype = decltype(dtype)::value;
    launch_row_parts<kDtype>(queue, in.private_logits, in.public_logits, cut,
                             device::PoolLook{memory.counters}, memory.parts);
    launch(queue, device::pool_sums_kernel<kDtype>, grid_of(shape.positions * tiles),
           dim3(device::kPoolThreads), 0, in, device::PoolGrid(options), options, cut, memory,
           static_cast<unsigned>(tiles), out);
  });
}

void pool_probabilities(const double* log_weights, const double* log_normaliser,
                        std::int64_t positions, std::int64_t vocab, double* probabilities,
                        const Queue& queue) {
  const DeviceGuard guard(queue);
  const std::int64_t blocks = mixture_blocks({1, positions, vocab});
  launch(queue, device::pool_probabilities_kernel, grid_of(positions * blocks),
         dim3(device::kPoolThreads), 0, log_weights, log_normaliser, positions, vocab,
         static_cast<unsigned>(blocks), probabilities);
}

void pool_mixture(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                  double* probabilities, const Queue& queue) {
  const DeviceGuard guard(queue);
  launch_mixture(queue, device::pool_mixture_kernel, in.shape, probabilities, in,
                 device::PoolGrid(options), options, log_normaliser);
}

void pool_log_prob(const Ensemble& in, const LogPoolOptions& options, const double* log_normaliser,
                   const std::int64_t* targets, double* result, const Queue& queue) {
  const DeviceGuard guard(queue);
  launch_warps(queue, device::pool_log_prob_kernel, in.shape.positions, in,
               device::PoolGrid(options), options, log_normaliser, targets, result);
}

}  // namespace adapmixed::cuda
