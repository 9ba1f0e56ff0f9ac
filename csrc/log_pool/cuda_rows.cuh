// What a pool's first kernel looks for, and the rows that a block of the second adds up, prepared
// from the parts that the first one left: their log-sum-exps, spans, statuses and places.
#pragma once

#include <type_traits>

#include "common/row_parts.cuh"
#include "log_pool/formula.h"

ADAPMIXED_CORE_BEGIN

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

// What the first kernel looks for besides the log-sum-exps: the extremes of z - z_0 over the tokens
// with q > 0. Clears the position's counter for the second.
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

constexpr int kPoolThreads = 256;
constexpr int kPoolWarps = kPoolThreads / kWarp;
constexpr int kPoolTile = kPoolThreads;  // tokens of a tile: in the end a thread takes one
constexpr int kPublicRow = kPoolThreads + kPoolWarps;  // behind the rows that a block prepares

// A row of logits and its PoolGrid::origin.
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

// The smallest and the largest log-ratio of a row by two neighbouring lanes, as in row_sum.
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
    const RowSum sum = row_sum<2, 7>(parts, cut.part_step, there ? cut.count : 0);
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

ADAPMIXED_CORE_END
