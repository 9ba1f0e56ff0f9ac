// The two kernels of a pool. The first reads all rows for their log-sum-exps and the extremes of
// their log-ratios (common/row_parts.cuh). The second reads them again, in the opposite order of
// positions, as the last rows may still be in the L2 cache. It adds up the models at each token,
// and its last block of a position takes the normaliser.
//
// Sums of u_i are exact integers, so warps share the models. All else is added in a fixed order.
#pragma once

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

ADAPMIXED_CORE_END
