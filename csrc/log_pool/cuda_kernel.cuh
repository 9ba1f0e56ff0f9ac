// The two kernels of a pool. The first reads all rows for their log-sum-exps and the extremes of
// their log-ratios (common/row_parts.cuh). The second reads them again, in the opposite order of
// positions, as the last rows may still be in the L2 cache. It adds up the models at each token,
// and its last block of a position takes the normaliser.
//
// Sums of u_i are exact integers, so warps share the models. All else is added in a fixed order.
#pragma once

#include "log_pool/cuda_rows.cuh"

ADAPMIXED_CORE_BEGIN

constexpr int kPoolTokens = kPoolTile / kWarp;  // of a lane, while its warp adds up some models
constexpr int kPoolRing = 4;  // rows of a warp in shared memory, all but one of them on their way
// Blocks that a multiprocessor has room for; the host counts on the larger number.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kPoolBlocks = 2;
#else
constexpr int kPoolBlocks = 3;
#endif

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
                        const int& tiles)
      : pieces_(memory), rows_(rows), vocab_(vocab), tiles_(tiles) {}

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
    int left = 2 * kPoolTile;  // that many or more, but for the last two tiles
    if (tile_ + 2 >= tiles_) left = static_cast<int>(vocab_ - begin);
    stage_tokens<D, kPoolTile>(to, rows_[row_].logits + begin, left);
    row_ = row_ == kPublicRow ? warp_id() : row_ + kPoolWarps;
    if (rows_[row_].logits == nullptr) row_ = kPublicRow, ++tile_;
  }

  Pieces pieces_;
  const PooledRow<D>* rows_;
  const std::int64_t& vocab_;
  const int& tiles_;
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
  out.log_normaliser[position] = most + std::log(weight);
}

ADAPMIXED_CORE_END
