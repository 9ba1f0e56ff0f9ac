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
constexpr int kPoolTile = kPoolThreads;         // tokens of a tile: in the end a thread takes one
constexpr int kPoolTokens = kPoolTile / kWarp;  // of a lane, while its warp adds up some models
constexpr int kPoolRing = 4;  // rows of a warp in shared memory, all but one of them on their way

constexpr int kPublicRow = kPoolThreads + kPoolWarps;  // behind the rows that a block prepares
constexpr int kPoolBlocks = 3;                         // that a multiprocessor has room for

// The weights of one warp's tokens in a tile, relative to the largest. NaN if a row is bad.
struct PoolTile {
  double largest, total;
};

// What the kernels of one call leave each other.
struct PoolMemory {
  RowPart* parts;      // (B, parts of a row, 1 + N)
  PoolTile* tiles;     // (B, tiles, kPoolWarps)
  unsigned* counters;  // (B), of finished blocks
};

// fl(a - b), rounded down and up.
__device__ inline float difference_down(float a, float b) {
#if defined(ADAPMIXED_SIMT)
  const double exact = static_cast<double>(a) - b;
  const float near = static_cast<float>(exact);
  return near > exact ? std::nextafterf(near, -HUGE_VALF) : near;
#else
  return __fsub_rd(a, b);
#endif
}
__device__ inline float difference_up(float a, float b) { return -difference_down(b, a); }

// What a pool looks for in its first read: the extremes of z - z_0 over the tokens with q > 0.
// Clears the position's counter for the second.
//
// fp32: in double. 16 bits: in floats, rounded down and up. The extremes of both are the same if
// the extreme differences are floats, as they nearly always are. If not, the part is read again.
template <Dtype D>
struct PoolLook {
  static constexpr bool kFloats = D != Dtype::f32;
  static constexpr int blocks(Dtype) {
    return kFloats ? 4 : 2;
  }  // that a multiprocessor has room for
  using Other = std::conditional_t<kFloats, float, double>;
  struct Doubles {
    double low = HUGE_VAL, high = -HUGE_VAL;
  };
  struct Floats {
    float low_down = HUGE_VALF, low_up = HUGE_VALF;
    float high_down = -HUGE_VALF, high_up = -HUGE_VALF;
  };
  using Found = std::conditional_t<kFloats, Floats, Doubles>;

  unsigned* counters;

  __device__ Other other(float z0) const { return z0 == -HUGE_VALF ? NAN : z0; }
  // NaN changes nothing.
  __device__ void see(Doubles& found, float z, double z0) const {
    const double difference = z - z0;
    found.low = vmin(difference, found.low);
    found.high = vmax(difference, found.high);
  }
  __device__ void see(Floats& found, float z, float z0) const {
    const float down = difference_down(z, z0), up = difference_up(z, z0);
    found.low_down = std::fmin(found.low_down, down);
    found.low_up = std::fmin(found.low_up, up);
    found.high_down = std::fmax(found.high_down, down);
    found.high_up = std::fmax(found.high_up, up);
  }
  __device__ void leave(Found&, std::int64_t) const {}
  template <Dtype>
  __device__ void finish(const Found& found, const typename Bits<D>::type* row, int size,
                         const Other* others, RowPart& part) const {
    Doubles exact;
    if constexpr (kFloats) {
      exact = {found.low_down, found.high_up};
      const bool rounded = found.low_down != found.low_up || found.high_down != found.high_up;
      if (__any_sync(kAllLanes, rounded)) {
        exact = {};
        for (int v = lane_id(); v < size; v += kWarp) see(exact, logit<D>(row, v), others[v]);
      }
    } else {
      exact = found;
    }
    double extremes[2] = {-exact.low, exact.high};
    warp_reduce(extremes, Max{});
    part.low = -extremes[0], part.high = extremes[1];
  }
  template <Dtype>
  __device__ void finish_public(const typename Bits<D>::type*, int, RowPart&) const {}
  __device__ void begin(std::int64_t position) const { counters[position] = 0; }
};

// A row of logits from a tile's first token on, and its PoolGrid::origin.
template <Dtype D>
struct PooledRow {
  const typename Bits<D>::type* logits;
  double origin;
};

// Writes the results of one private row, of whose log-ratios these are the extremes.
__device__ inline void write_row(const PoolGrid& grid, const RowSum& sum, double public_lse,
                                 double low, double high, std::int64_t at,
                                 const LogPoolResults& out) {
  const double origin = grid.origin(sum.lse, public_lse);
  const bool public_ok = std::isfinite(public_lse);
  out.span[at] = sum.status == kRowOk && public_ok
                     ? grid.span(grid.position(low, origin), grid.position(high, origin))
                     : NAN;
  out.private_lse[at] = sum.lse;
  out.status[at] = public_ok ? sum.status : kRowPublic;
}

// The smallest and the largest log-ratio of a row by two neighbouring lanes, as in row_sum_of_two.
struct PoolExtremes {
  double low = HUGE_VAL, high = -HUGE_VAL;
};
__device__ inline PoolExtremes extremes_by_two(const RowPart* parts, const RowParts& cut,
                                               bool there) {
  PoolExtremes own;
#pragma unroll 8
  for (int k = lane_id() % 2; k < cut.count; k += 2) {
    if (there) own.low = vmin(parts[k * cut.part_step].low, own.low);
    if (there) own.high = vmax(parts[k * cut.part_step].high, own.high);
  }
  own.low = vmin(__shfl_xor_sync(kAllLanes, own.low, 1), own.low);
  own.high = vmax(__shfl_xor_sync(kAllLanes, own.high, 1), own.high);
  return own;
}

// row_sum of one row by two neighbouring lanes, each of which takes every second part. A whole warp
// must call this together.
__device__ inline RowSum row_sum_of_two(const RowPart* parts, const RowParts& cut, bool there) {
  constexpr int kLoads = 7;
  float largest = -HUGE_VALF;
  int octaves = octaves_of(largest);
  double total = 0.0;
  for (int first = lane_id() % 2; first < cut.count; first += 2 * kLoads) {
    double sums[kLoads];
    int of[kLoads], most = octaves;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int k = first + 2 * j;
      const bool present = there && k < cut.count;
      const RowPart* part = parts + k * cut.part_step;
      sums[j] = present ? part->sum : 0.0;
      of[j] = present ? part->octaves : octaves;
      largest = std::fmax(largest, present ? part->largest : -HUGE_VALF);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) most = of[j] > most ? of[j] : most;
    total *= scale_down(octaves - most);
    octaves = most;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) total = vfma(sums[j], scale_down(of[j] - octaves), total);
  }
  largest = std::fmax(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  const int other = __shfl_xor_sync(kAllLanes, octaves, 1);
  const int most = other > octaves ? other : octaves;
  total *= scale_down(octaves - most);
  total += __shfl_xor_sync(kAllLanes, total, 1);
  return row_sum_of(total, largest, most);
}

// What a warp reads of some tiles: of each tile the public row, then every kPoolWarps-th of the
// rows. A whole warp must call each member together.
template <Dtype D>
class StagedRows {
 public:
  using Pieces = StagedPieces<D, kPoolTile, kPoolRing>;
  using Word = typename Pieces::Word;

  // memory: Pieces::kBytes of this warp's own. rows: the public one at kPublicRow, and no logits
  // behind the others. `tiles`: of a row.
  __device__ StagedRows(char* memory, const PooledRow<D>* rows, const std::int64_t& vocab,
                        int tiles)
      : pieces_(memory), rows_(rows), vocab_(vocab), near_end_(tiles - 2) {}

  // Begins with these tiles. Nothing is on its way.
  __device__ void start(int tile, int end) {
    row_ = kPublicRow, tile_ = tile, end_ = end;
    pieces_.start([this](Word* to) { copy(to); });
  }
  // The next row's tokens of a tile, the first of which is `from` in global memory.
  __device__ const Word* await(const Word* from) {
    return pieces_.await(from, [this](Word* to) { copy(to); });
  }

 private:
  __device__ void copy(Word* to) {
    if (tile_ >= end_) return;
    const std::int64_t begin = std::int64_t{tile_} * kPoolTile;
    int left = 2 * kPoolTile;  // that many or more
    if (tile_ >= near_end_) left = static_cast<int>(vocab_ - begin);
    stage_tokens<D, kPoolTile>(to, rows_[row_].logits + begin, left);
    row_ = row_ == kPublicRow ? warp_id() : row_ + kPoolWarps;
    if (rows_[row_].logits == nullptr) row_ = kPublicRow, ++tile_;
  }

  Pieces pieces_;
  const PooledRow<D>* rows_;
  const std::int64_t& vocab_;
  const int near_end_;  // the first tile with fewer than two tiles' tokens from its begin on
  int row_ = kPublicRow, tile_ = 0, end_ = 0;
};

// Adds the clipped log-ratios of a warp's rows, as the bits of their positions, to the sums of its
// lanes, each of which takes every kWarp-th of a tile's tokens from `begin` on.
template <Dtype D>
__device__ void add_rows(const PoolGrid& grid, StagedRows<D>& staged, const PooledRow<D>* rows,
                         std::int64_t begin, std::uint64_t* sums) {
  double public_logits[kPoolTokens];
  const auto* tokens = staged.await(rows[kPublicRow].logits + begin);
#pragma unroll
  for (int k = 0; k < kPoolTokens; ++k) {
    public_logits[k] = float_of<D>(tokens[k * kWarp + lane_id()]);
  }
#pragma unroll 1
  for (rows += warp_id(); rows->logits != nullptr; rows += kPoolWarps) {
    tokens = staged.await(rows->logits + begin);
    const double origin = rows->origin;
#pragma unroll
    for (int k = 0; k < kPoolTokens; ++k) {
      const double z = float_of<D>(tokens[k * kWarp + lane_id()]);
      const double position = grid.position(z - public_logits[k], origin);
      sums[k] += bit_cast<std::uint64_t>(grid.clipped(position));
    }
  }
}

// The log-sum-exps of rows `first` to `first` + kPoolThreads - 1 of a position, and what add_rows
// needs of them. Returns whether one of them is bad. Writes results if `write`. A whole block must
// call this together.
template <Dtype D>
__device__ bool prepare_rows(const LogPoolInputs& in, const PoolGrid& grid,
                             const LogPoolOptions& options, const RowParts& cut,
                             const RowPart* all_parts, std::int64_t position, int first, bool write,
                             PooledRow<D>* rows, double& shared_lse, const LogPoolResults& out) {
  constexpr int kPairs = kPoolThreads / 2;
  bool bad = false;
#pragma unroll 1
  for (int from = 0; from < kPoolThreads && first + from < cut.rows; from += kPairs) {
    const int slot = from + static_cast<int>(threadIdx.x) / 2, row = first + slot;
    const bool there = row < cut.rows;
    const RowPart* parts = all_parts + cut.first(position) + row * cut.row_step;
    const RowSum sum = row_sum_of_two(parts, cut, there);
    PoolExtremes extremes;
    if (write) extremes = extremes_by_two(parts, cut, there);
    const bool writes = there && threadIdx.x % 2 == 0;
    if (row == 0 && writes) {
      shared_lse = sum.lse;
      if (write) {
        out.public_lse[position] = sum.lse;
        out.public_status[position] = sum.status;
      }
    }
    if (first + from == 0) __syncthreads();
    const double public_lse = shared_lse;
    bad |= !std::isfinite(public_lse);
    if (!writes) continue;
    // The public row stands for itself and for rows without a part in the pool: its u_i are 0.
    rows[slot] = {row_bits<D>(in.public_logits, 0, position), kGridZero};
    if (row == 0) continue;
    const std::int64_t at = (row - 1) * in.shape.positions + position;
    if (write) write_row(grid, sum, public_lse, extremes.low, extremes.high, at, out);
    if (takes_part(options, at)) {
      rows[slot] = {row_bits<D>(in.private_logits, row - 1, position),
                    grid.origin(sum.lse, public_lse)};
      bad |= sum.status != kRowOk;
    }
  }
  const int end = cut.rows - first < kPoolThreads ? cut.rows - first : kPoolThreads;
  if (threadIdx.x < kPoolWarps) rows[end + threadIdx.x] = {nullptr, 0.0};
  if (threadIdx.x == 0) rows[kPublicRow] = {row_bits<D>(in.public_logits, 0, position), kGridZero};
  return __syncthreads_or(bad) != 0;
}

// Of a block's shared memory: the warps' sums of a tile, and the rows of a warp on their way.
constexpr int kPoolPartial = kPoolWarps * kPoolTile * static_cast<int>(sizeof(std::uint64_t));
template <Dtype D>
constexpr int pool_shared_bytes() {
  return kPoolPartial + kPoolWarps * StagedRows<D>::Pieces::kBytes;
}

// One block takes `each` tiles of one position, one after the other.
template <Dtype D>
__global__ void __launch_bounds__(kPoolThreads, kPoolBlocks)
    pool_sums_kernel(const __grid_constant__ LogPoolInputs in,
                     const __grid_constant__ PoolGrid grid,
                     const __grid_constant__ LogPoolOptions options,
                     const __grid_constant__ RowParts cut,
                     const __grid_constant__ PoolMemory memory, int tiles, int each,
                     const __grid_constant__ LogPoolResults out) {
  __shared__ PooledRow<D> rows[kPublicRow + 1];
  __shared__ double public_lse;
  auto* partial = dynamic_shared<std::uint64_t>();  // (kPoolWarps, kPoolTile)
  constexpr int kBytes = StagedRows<D>::Pieces::kBytes;
  StagedRows<D> staged(dynamic_shared<char>() + kPoolPartial + warp_id() * kBytes, rows,
                       in.shape.vocab, tiles);
  const int thread = static_cast<int>(threadIdx.x);
  const unsigned blocks = (tiles + each - 1) / each;  // of a position
  const unsigned block = blockIdx.x % blocks;
  const std::int64_t position = in.shape.positions - 1 - blockIdx.x / blocks;
  bool bad = false;
  const int first_tile = static_cast<int>(block) * each;
  const int last = first_tile + each < tiles ? first_tile + each : tiles;
#pragma unroll 1
  for (int tile = first_tile; tile < last; ++tile) {
    const bool begins = tile == first_tile, together = cut.rows <= kPoolThreads;
    const std::int64_t begin = static_cast<std::int64_t>(tile) * kPoolTile;
    const int size =
        in.shape.vocab - begin < kPoolTile ? static_cast<int>(in.shape.vocab - begin) : kPoolTile;
    std::uint64_t sums[kPoolTokens] = {};
#pragma unroll 1
    for (int first = 0; first < cut.rows; first += kPoolThreads) {
      // If all rows fit, they are prepared once, and tiles follow each other without a pause.
      if (begins || !together) {
        if (!begins || first > 0) __syncthreads();  // the rows take the place of others
        bad |= prepare_rows<D>(in, grid, options, cut, memory.parts, position, first, tile == 0,
                               rows, public_lse, out);
        staged.start(tile, together ? last : tile + 1);
      }
      add_rows<D>(grid, staged, rows, begin, sums);
    }
    if (!begins) __syncthreads();  // the last tile's sums have been read
#pragma unroll
    for (int k = 0; k < kPoolTokens; ++k) {
      partial[warp_id() * kPoolTile + k * kWarp + lane_id()] = sums[k];
    }
    __syncthreads();

    double log_weight = -HUGE_VAL;
    if (thread < size) {
      // kGridZero plus the units of all rows.
      std::uint64_t bits =
          bit_cast<std::uint64_t>(kGridZero) * static_cast<std::uint64_t>(1 - cut.rows);
#pragma unroll
      for (int w = 0; w < kPoolWarps; ++w) bits += partial[w * kPoolTile + thread];
      const double sum = grid.nats(bit_cast<double>(bits));
      log_weight =
          grid.log_weight(sum, logit<D>(rows[kPublicRow].logits, begin + thread) - public_lse);
      out.log_weights[position * in.shape.vocab + begin + thread] = log_weight;
    }
    double largest[1] = {log_weight};
    warp_reduce(largest, Max{});
    double total[1] = {largest[0] > -HUGE_VAL ? exp_(log_weight - largest[0]) : 0.0};
    warp_reduce(total, Add{});
    if (lane_id() == 0) {
      memory.tiles[(position * tiles + tile) * kPoolWarps + warp_id()] = {largest[0],
                                                                          bad ? NAN : total[0]};
    }
  }
  __threadfence();
  __syncthreads();
  if (!is_last_block(memory.counters + position, blocks)) return;

  const PoolTile* all = memory.tiles + position * tiles * kPoolWarps;
  double most = -HUGE_VAL, weight = 0.0;
  const int count = tiles * kPoolWarps;
#pragma unroll 4
  for (int k = thread; k < count; k += kPoolThreads) most = vmax(all[k].largest, most);
  most = block_max(most);
#pragma unroll 4
  for (int k = thread; k < count; k += kPoolThreads) {
    weight += all[k].total * exp_(all[k].largest - most);
  }
  weight = block_sum(weight);
  if (thread != 0) return;
  const double found = most + std::log(weight);
  out.log_normaliser[position] = found;
  out.log_weights[in.shape.positions * in.shape.vocab + position] = found;
}

ADAPMIXED_CORE_END
